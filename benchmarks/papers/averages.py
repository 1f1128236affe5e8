"""Means over the results of `vlkv eval` that some tables print: "Avg %", means by category, and lengths of answers.

    python -m benchmarks.papers.averages COCO/results.json=cider MME/results.json=mme POPE/results.json=exact,pope-f1
    python -m benchmarks.papers.averages --by-dataset DATA.jsonl OUT/results.json --judge COMMAND
    python -m benchmarks.papers.averages --lengths OUT/results.json
    python -m benchmarks.papers.averages --same OUT/results.json

The first divides each metric by that of the full cache (LightKV: "the average of all performance metrics normalized
against the vanilla model"). The second averages a judge's scores over each `dataset` of the questions, such as the
categories of MMBench-Video. The third counts the words of an answer, and the last the answers that are the same as with
the full cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.milebench import score_files
from vlkv.errors import InputError
from vlkv.files import require_json
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.evaluation.metrics import judge
from vlkv.tools.evaluation.records import Scored


def relative(results: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> dict[str, float]:
    """For each policy, the mean of its metrics in percent of the full cache's.

    Args:
        results: contents of results.json with the same policies, and the metrics of each.

    Raises:
        InputError: other policies, no full cache, or a metric that is missing or 0 for the full cache.
    """
    names = [row["policy"] for row in results[0][0]["rows"]]
    if "full" not in names or any([row["policy"] for row in each["rows"]] != names for each, _ in results):
        raise InputError("all results need the same policies, and full among them")
    columns = []
    for each, metrics in results:
        for metric in metrics:
            values = np.array([row.get(metric, np.nan) for row in each["rows"]], float)
            full = values[names.index("full")]
            if not full > 0:
                raise InputError(f"{metric}: not measured, or 0 for the full cache, so nothing is relative to it")
            columns.append(100 * values / full)
    return dict(zip(names, np.mean(columns, axis=0).tolist(), strict=True))


def lengths(results: Mapping[str, Any]) -> dict[str, float]:
    """For each policy, the mean number of words of an answer."""
    counts = [[len(said.split()) for said in answer["said"]] for answer in results["answers"]]
    return dict(zip((row["policy"] for row in results["rows"]), np.mean(counts, axis=0).tolist(), strict=True))


def same(results: Mapping[str, Any]) -> dict[str, float]:
    """For each policy, the share of its answers that are those of the full cache.

    Raises:
        InputError: no full cache.
    """
    names = [row["policy"] for row in results["rows"]]
    if "full" not in names:
        raise InputError("--same needs answers of full")
    equal = [[said == answer["said"][names.index("full")] for said in answer["said"]] for answer in results["answers"]]
    return dict(zip(names, np.mean(equal, axis=0).tolist(), strict=True))


def run(args: argparse.Namespace) -> Any:
    if args.by_dataset is not None:
        if args.judge is None or len(args.results) != 1:
            raise InputError("--by-dataset needs one results.json and --judge")

        def score(row: Mapping[str, Any], response: str) -> float:
            accepted = tuple(row.get("answers", [row.get("answer", "")]))
            return judge(args.judge, Scored(response, accepted, question=row["question"]))

        return score_files(args.by_dataset, Path(args.results[0]), score)
    if measure := lengths if args.lengths else same if args.same else None:
        return {path: measure(require_json(Path(path))) for path in args.results}
    pairs = [text.rpartition("=") for text in args.results]
    if not all(path for path, _, _ in pairs):
        raise InputError("name the metrics of each file, as in COCO/results.json=cider")
    return relative([(require_json(Path(path)), metrics.split(",")) for path, _, metrics in pairs])


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.papers.averages", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="results.json=METRIC,..., or results.json")
    by_dataset = "average over each dataset of these questions"
    parser.add_argument("--by-dataset", type=Path, metavar="DATA.jsonl", help=by_dataset)
    parser.add_argument("--judge", metavar="COMMAND", help="scores answers, as in vlkv eval")
    parser.add_argument("--lengths", action="store_true", help="count the words of answers")
    parser.add_argument("--same", action="store_true", help="share of the answers that are those of full")
    args = parser.parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
