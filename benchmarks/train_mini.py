"""Trains the demo model that ships in vlkv/mini/checkpoint: `python -m benchmarks.train_mini --out FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlkv.mini import training


def main() -> None:
    """Reads the options and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("mini-checkpoint"), help="the folder to write")
    parser.add_argument(
        "--work", type=Path, default=Path("mini-work"), help="folder of the state, from which a run resumes"
    )
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="an earlier demo model to start from")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--machine", default="", help="description of the machine, for the log")
    options = parser.parse_args()
    training.train(
        options.out, options.work, training.Settings(), checkpoint=options.start, every=options.every,
        machine=options.machine,
    )  # fmt: skip


if __name__ == "__main__":
    main()
