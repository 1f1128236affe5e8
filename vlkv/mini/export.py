"""Writes pages of held-out digits as PNG images, and a JSONL file of questions for `vlkv eval`.

    python -m vlkv.mini.export FOLDER --pages 200

`benchmarks/data/ledger` was written by this command.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from vlkv.errors import InputError
from vlkv.files import replacing
from vlkv.mini import pages
from vlkv.terminal import OneLineParser, guarded

QUESTIONS = "questions.jsonl"


def export(folder: Path, count: int, *, kind: str = "ledger", seed: int = 0, questions: int = 1) -> Path:
    """Writes `count` pages and questions about them. Equal arguments give equal files.

    Args:
        folder: created if it does not exist.
        count: number of pages.
        kind: kind of the pages, a name of `pages.KINDS`.
        seed: for the random choices of the pages.
        questions: limit on the questions per page. 1: the question of `pages.held_out`. More: the first entries of the
            page; on a digit page first the whole page, then its rows from the top.

    Returns:
        The JSONL file.

    Raises:
        InputError: fewer than one page or question, or the kind is unknown.
    """
    if kind not in pages.KINDS:
        raise InputError(f"unknown kind of pages {kind!r}: kinds are {', '.join(pages.KINDS)}")
    if count < 1 or questions < 1:
        raise InputError(f"{count} pages with {questions} questions each: both numbers must be at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        page, entry = pages.held_out_page(rng, kind)
        asked = [entry] if questions == 1 else page.entries[:questions]
        name = f"page{number:03}.png"
        page.image.convert("L").save(folder / name, optimize=True)
        for i, (question, answer, *_) in enumerate(asked):
            rows.append({"id": f"{number:03}-{i}", "image": name, "question": question, "answers": [answer]})
    with replacing(folder / QUESTIONS) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / QUESTIONS


def main() -> int:
    """Parses the command line and writes the files."""
    parser = OneLineParser(prog="python -m vlkv.mini.export", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--pages", type=int, default=200, metavar="N")
    parser.add_argument("--kind", default="ledger", help=f"of the pages: {', '.join(pages.KINDS)} (default: ledger)")
    parser.add_argument("--questions", type=int, default=1, metavar="N", help="per page (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    args: argparse.Namespace = parser.parse_args()
    return guarded(
        lambda: str(export(args.folder, args.pages, kind=args.kind, seed=args.seed, questions=args.questions))
    )


if __name__ == "__main__":
    sys.exit(main())
