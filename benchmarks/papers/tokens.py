"""Counts the vision and instruction tokens of questions: the means of AirCache's Table 7. Needs no weights.

python -m benchmarks.papers.tokens DATA.jsonl --model MODEL
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vlkv import loading
from vlkv.inputs import Inputs
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.commands.samples import inputs_of, read_samples


def count(inputs: Inputs) -> tuple[int, int]:
    """Number of vision tokens of a row, and of text tokens after the last of them; all text if there is no image."""
    valid = inputs.valid[0]
    vision = np.flatnonzero(inputs.is_vision[0] & valid)
    after = valid & (np.arange(len(valid)) > (vision[-1] if len(vision) else -1))
    return len(vision), int(after.sum())


def run(args: argparse.Namespace) -> str:
    """The means, as in a row of Table 7."""
    processor = loading.load_processor(args.model)
    counts = np.array([count(inputs_of(processor, sample)) for sample in read_samples(args.data, None)])
    vision, text = counts.mean(axis=0)
    return f"{args.model}, {len(counts)} questions of {args.data}: N_v {vision:.0f}, N_t {text:.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.papers.tokens", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA.jsonl", help="questions as for vlkv eval")
    parser.add_argument("--model", required=True, metavar="DIR", help="a checkpoint folder, a hub id, or mini")
    args = parser.parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
