"""Writes held-out pages and their questions: `python -m benchmarks.documents FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.documents.pages import export
from vlkv.terminal import OneLineParser, guarded


def main() -> int:
    """Reads the options and writes the files."""
    parser = OneLineParser(prog="python -m benchmarks.documents", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--size", type=int, default=384, help="pixels per side of a page")
    args: argparse.Namespace = parser.parse_args()
    return guarded(lambda: export(args.folder, args.size))


if __name__ == "__main__":
    sys.exit(main())
