"""Lists every table and figure of the five papers, the commands that repeat its protocol, and what is missing for it.

    python -m benchmarks.papers [--paper NAME] [--check] [--dry-run]
    python -m benchmarks.papers --run "AirCache, Table 1" --model MODEL --data DATA.jsonl --out OUT

Above its commands, a table has the paper's settings with their places, ours, and the differences with their reasons;
`--check` compares all commands with them. MODEL is a checkpoint folder, and DATA.jsonl a data set as for `vlkv eval`;
the repository contains neither. `--run` runs all commands of a table on one model and data set, and prints each with
the rows and columns of the paper. Other questions than those that are evaluated, such as SAMPLES.jsonl for a profile,
are given by `--file SAMPLES.jsonl=PATH`. `--dry-run` parses every command, builds inputs and evaluates each policy's
program with `eval_shape`.
"""

import sys

from benchmarks.papers.listing import main

sys.exit(main())
