"""Lists every table and figure of the five papers, the commands that repeat its protocol, and what is missing for it.

    python -m benchmarks.papers [--paper NAME] [--dry-run]
    python -m benchmarks.papers --run "AirCache, Table 1" --model MODEL --data DATA.jsonl --out OUT

MODEL is a checkpoint folder, and DATA.jsonl a data set as for `vlkv eval`; the repository contains neither. `--run`
runs all commands of a table on one model and data set, and prints each with the rows and columns of the paper.
`--dry-run` parses every command, builds inputs and evaluates each policy's program with `eval_shape`.
"""

import sys

from benchmarks.papers.listing import main

sys.exit(main())
