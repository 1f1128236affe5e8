"""Which findings of the five papers hold on models that run here: docs/papers.md.

    python -m benchmarks.findings                   the verdicts
    python -m benchmarks.findings --write           write docs/papers.md from the committed results
    python -m benchmarks.findings --check           exit status 1 if the page differs from the results
    python -m benchmarks.findings --measure NAME    measure; a run that was interrupted resumes

The claims are in claims.toml, the results in benchmarks/results/findings, quality.json and real.jsonl.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.findings import table
from benchmarks.findings.table import FOLDER, Series
from vlkv.errors import InputError
from vlkv.terminal import OneLineParser, guarded

_EXPERIMENTS = ("reference", "answers", "images")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m benchmarks.findings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the page")
    what.add_argument("--check", action="store_true", help="compare the page with the results")
    what.add_argument("--measure", choices=_EXPERIMENTS, help="an experiment")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further batch after that time")
    return guarded(lambda: _run(parser.parse_args(arguments)))


def _run(args: argparse.Namespace) -> str | None:
    if args.measure:
        from benchmarks.findings import pages, text  # (they load jax)

        experiments = {"reference": text.reference, "answers": pages.answers, "images": pages.images}
        experiments[args.measure](Series(FOLDER / f"{args.measure}.json", args.seconds))
        return None
    page = table.PAGE.read_text()
    if args.write:
        table.PAGE.write_text(table.written(page))
    elif args.check and page != table.written(page):
        raise InputError(f"{table.PAGE.name} differs from the results: python -m benchmarks.findings --write")
    return "\n".join(table.summary(table.outcomes()))


if __name__ == "__main__":
    sys.exit(main())
