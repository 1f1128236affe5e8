"""Pages of held-out digits as files: PNG images, and a JSONL of questions that `vlkv eval` reads.

    python -m vlkv.mini.export FOLDER --pages 200

`benchmarks/data/digits` holds what this command writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from vlkv.errors import InputError
from vlkv.mini import pages
from vlkv.terminal import OneLineParser, guarded

QUESTIONS = "digits.jsonl"


def export(folder: Path, count: int, *, seed: int = 0, questions: int = 1) -> Path:
    """Writes `count` pages and the questions about them; the same numbers give the same files.

    Args:
        folder: made if need be.
        count: pages.
        seed: of the pages.
        questions: rows per page. One: of five pages two ask for the whole page, three for a line, as in
            `pages.held_out`; more: the whole page, then its lines from the top, as many as it has.

    Returns:
        The JSONL file.

    Raises:
        InputError: fewer than one page or question.
    """
    if count < 1 or questions < 1:
        raise InputError(f"{count} pages with {questions} questions each: there must be at least one of both")
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        page, row = pages.held_out_page(rng)
        asked = [row] if questions == 1 else [None, *range(len(page.rows))][:questions]
        name = f"page{number:03}.png"
        page.image.convert("L").save(folder / name, optimize=True)
        for one in asked:
            about = "page" if one is None else f"row{one + 1}"
            rows.append({"id": f"{number:03}-{about}", "image": name,
                         "question": pages.question(one), "answers": [page.answer(one)]})  # fmt: skip
    (folder / QUESTIONS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / QUESTIONS


def main() -> int:
    """The command."""
    parser = OneLineParser(prog="python -m vlkv.mini.export", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--pages", type=int, default=200, metavar="N")
    parser.add_argument("--questions", type=int, default=1, metavar="N", help="rows per page (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    args: argparse.Namespace = parser.parse_args()
    return guarded(lambda: str(export(args.folder, args.pages, seed=args.seed, questions=args.questions)))


if __name__ == "__main__":
    sys.exit(main())
