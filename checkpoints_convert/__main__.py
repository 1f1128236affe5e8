"""`python -m checkpoints_convert SRC DST`: the same as `vlkv convert`."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
from pathlib import Path
from typing import Any

from checkpoints_convert import converting
from checkpoints_convert.converting import DTYPES, FORMATS, verify
from vlkv.errors import InputError
from vlkv.families.folders import describe
from vlkv.terminal import OneLineParser, guarded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `convert`, shared with the `vlkv` command."""
    parser.add_argument("source", type=Path, metavar="SRC", help="a checkpoint folder, Hugging Face's or its authors'")
    parser.add_argument("destination", type=Path, nargs="?", metavar="DST", help="the folder to write; must not exist")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the written weights; without it, the source's own")
    parser.add_argument("--format", choices=FORMATS, default="safetensors", help="of the written weights (%(default)s)")
    parser.add_argument("--verify", action="store_true", help="only compare SRC, a converted folder, with its manifest")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> str:
    """Does what the arguments say and returns one line about it."""
    if args.verify:
        verify(args.source)
        return f"{args.source}: every file agrees with the manifest"
    if args.destination is None:
        raise InputError("convert needs a destination: vlkv convert SRC DST")
    _return_memory_at_once()
    made = convert(args.source, args.destination, dtype=args.dtype, format=args.format, progress=not args.quiet)
    return f"wrote {made}"


def convert(source: Path, destination: Path, **options: Any) -> Path:
    """`converting.convert` of a checkpoint of any family."""
    return converting.convert(source, destination, describe, **options)


def _return_memory_at_once() -> None:
    """Has glibc map all that is larger than 1 MiB by itself, where there is a glibc, for the rest of the process.

    By itself it takes up to 32 MiB from its heaps once it has seen as much, one heap for each of tensorstore's threads,
    and of every heap a part stays: 200 MB after 2 GiB.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD


def main() -> int:
    """Entry point."""
    parser = OneLineParser(prog="python -m checkpoints_convert", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
