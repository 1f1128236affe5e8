"""Writes a published text model as a folder into the user's cache; or measures on SmolLM2-135M-Instruct.

    python -m benchmarks.real [NAME]     write the folder if it is missing, and print its path
    python -m benchmarks.real quality    our methods and kvpress' presses on made tasks; see --help
    python -m benchmarks.real questions  the made tasks as questions for `vlkv eval` and `vlkv frontier`; see --help

Nothing is downloaded: the weights are those of Python packages, GGUF files in 4 bits, which transformers reads. NAME is
SmolLM2-135M-Instruct (Apache-2.0) or gemma-3-270m (Gemma Terms of Use; only tests use it).
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.real import folders, quality, questions
from vlkv.terminal import OneLineParser, guarded


def write(arguments: Sequence[str]) -> int:
    """Writes a folder and prints its path."""
    parser = OneLineParser(
        prog="python -m benchmarks.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {checkpoint.name: checkpoint for checkpoint in folders.CHECKPOINTS.values()}
    parser.add_argument("name", nargs="?", default=folders.SMOLLM2.name, choices=names, help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    return guarded(lambda: str(folders.written(names[args.name])))


_COMMANDS = {"quality": quality.main, "questions": questions.main}

if __name__ == "__main__":
    name, *rest = [*sys.argv[1:], ""]
    sys.exit(_COMMANDS[name](rest[:-1]) if name in _COMMANDS else write(sys.argv[1:]))
