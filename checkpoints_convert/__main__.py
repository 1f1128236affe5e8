"""Convert a Hugging Face checkpoint to a checked, sharded copy with a manifest. The same command resumes a
conversion that was interrupted, from the folder .DST.partial beside DST.

vlkv convert SRC DST --dtype bfloat16
python -m checkpoints_convert SRC DST --format orbax
"""

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
    parser.add_argument("source", type=Path, metavar="SRC", help="a checkpoint folder of Hugging Face or the authors")
    parser.add_argument(
        "destination", type=Path, nargs="?", metavar="DST", help="the folder to write, which must be new"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the written weights (default: that of the source)")
    parser.add_argument("--format", choices=FORMATS, default="safetensors", help="format of the written weights")
    parser.add_argument("--verify", action="store_true", help="only compare SRC, a converted folder, with its manifest")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> str:
    """Runs the command and returns one line about its result."""
    if args.verify:
        verify(args.source)
        return f"{args.source}: every file agrees with the manifest"
    if args.destination is None:
        raise InputError("convert needs a destination: vlkv convert SRC DST")
    _return_memory_at_once()
    options = {"dtype": args.dtype, "format": args.format, "progress": not args.quiet}
    folder = convert(args.source, args.destination, **options, say=lambda line: print(line, file=sys.stderr))
    return f"wrote {folder}"


def convert(source: Path, destination: Path, **options: Any) -> Path:
    """`converting.convert` of a checkpoint of any family."""
    return converting.convert(source, destination, describe, **options)


def _return_memory_at_once() -> None:
    """Makes glibc allocate blocks larger than 1 MiB with mmap, for the rest of the process.

    Otherwise glibc takes blocks of up to 32 MiB from a heap for each of tensorstore's threads, and does not return all
    of this memory: after 2 GiB it keeps 200 MB.
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
