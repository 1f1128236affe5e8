"""The time of a decoding step with several rows relative to that with one row, measured alternately in one process.

    python -m benchmarks.batches [--model DIR] [--policy full "snapkv(keep=0.1)"] [--batch 1 4] [--out JSON]

`vlkv bench` alternates the policies of one batch, so the noise of a shared machine does not cancel out between batches.
Prompts are random text; all programs are compiled before the first round, and two rounds are not counted. The table
has medians, the ratio of the medians, and the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from vlkv import policies
from vlkv.errors import InputError
from vlkv.files import write_json
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.benching import machine
from vlkv.tools.benching.programs import SEED, compile_pair
from vlkv.tools.benching.settings import make_inputs
from vlkv.tools.benching.subjects import find

WARM = 2  # rounds that are not counted


def main() -> int:
    """Measures, prints the table, writes the JSON."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini", help="as in `vlkv bench` (default: the demo model)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="(default: as in `vlkv bench`)")
    parser.add_argument("--policy", nargs="+", default=["full", "snapkv(keep=0.1)"], metavar="METHOD")
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 4],
        metavar="B",
        help="numbers of rows; ratios are to the first (default: 1 4)",
    )
    parser.add_argument("--prompt", type=int, default=1024, metavar="T", help="tokens of a row (default: 1024)")
    parser.add_argument("--new", type=int, default=16, metavar="S", help="tokens of an answer (default: 16)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="(default: 15)")
    parser.add_argument("--out", type=Path)
    return guarded(lambda: run(parser.parse_args()))


def run(args: argparse.Namespace) -> None:
    """Compiles everything, then measures."""
    if min(*args.batch, args.prompt, args.rounds) < 1 or args.new < 2:
        raise InputError("--batch, --prompt and --rounds must be at least 1, and --new at least 2")
    chosen = {text: policies.make(text) for text in args.policy}
    subject = find(args.model, dtype=args.dtype)
    params = subject.params()
    decoders: dict[tuple[str, int], Any] = {}
    for text, policy in chosen.items():
        for batch in args.batch:
            inputs = jax.device_put(make_inputs(subject.config, batch, args.prompt, 0))
            pair = compile_pair(params, inputs, policy, new=args.new)
            decoders[text, batch] = pair.decode.run, *pair.prefill.run(params, inputs, SEED)

    def seconds(name: tuple[str, int]) -> float:
        decode, cache, logits = decoders[name]
        begin = time.perf_counter()
        jax.block_until_ready(decode(params, cache, logits))
        return (time.perf_counter() - begin) / (args.new - 1)

    times = {name: np.zeros(WARM + args.rounds) for name in decoders}
    for number in range(WARM + args.rounds):
        order = list(decoders)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            times[name][number] = seconds(name)
    rows: list[dict[str, Any]] = []
    table = Table("policy", "rows", "ms/step", "ratio of medians", "median of ratios")
    for text, batch in decoders:
        taken, first = (times[text, size][WARM:] for size in (batch, args.batch[0]))
        median, ratio, ratios = np.median(taken), np.median(taken) / np.median(first), np.median(taken / first)
        table.add_row(text, str(batch), f"{1e3 * median:.2f}", f"{ratio:.3f}", f"{ratios:.3f}")
        rows.append({"policy": text, "batch": batch, "step_seconds": float(median), "ratio_of_medians": float(ratio),
                     "median_of_ratios": float(ratios), "step_times": taken.tolist()})  # fmt: skip
    Console().print(table)
    if args.out:
        setting = {"model": subject.name, "dtype": subject.dtype.name, "prompt": args.prompt, "new": args.new}
        write_json(args.out, {"machine": machine.describe(), **setting, "rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())
