"""Writes pages of held-out digits as PNG images, and a JSONL file of questions for `vlkv eval`.

    python -m vlkv.mini.export FOLDER --pages 200

`benchmarks/data/ledger` was written by this command.
"""

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
    """Writes `count` pages and at most `questions` about each; returns the JSONL file. Equal arguments, equal files.

    With one question per page it is that of `pages.held_out`, otherwise the first entries of the page: on a digit page
    first the whole page, then its rows from the top.
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
    args = parser.parse_args()
    options = {"kind": args.kind, "seed": args.seed, "questions": args.questions}
    return guarded(lambda: str(export(args.folder, args.pages, **options)))


if __name__ == "__main__":
    sys.exit(main())
