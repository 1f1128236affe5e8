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
from vlkv.files import DATA
from vlkv.terminal import OneLineParser, add_options, guarded

OPTIONS = {"--dtype": {"choices": list(DTYPES)}, "--format": {"choices": FORMATS}}


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
    add_options(parser, DATA / "options.toml", "convert", OPTIONS)
    args = parser.parse_args()
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
