"""A-VL, Figure 8: attention to 30 % of the stored entries, by its operator, by copying them, and by masking.

    python -m benchmarks.core_attention --batch 1 8

The figure has bars without numbers, so only our numbers are shown: sizes of LLaVA-1.6-7B, one layer; the paper used an
A40.

Axes: B batch · N query heads · K key heads · H head dim · S stored entries.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from pallas_kernels import core_attention, decode_attention
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.benching.results import Results
from vlkv.tools.benching.subjects import default_dtype

HEADS, HEAD_DIM, SHARE = 32, 128, 0.3


def measure(batch: int, stored: int, dtype: Any, rounds: int) -> dict[str, float]:
    """Milliseconds of attention to all entries, to the core by its operator, to a copy of the core, and with a mask."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, HEADS, HEAD_DIM), dtype)
    k, v = (jax.random.normal(key, (batch, HEADS, stored, HEAD_DIM), dtype) for key in keys[1:])
    listed = max(1, int(SHARE * stored))
    rows = jnp.sort(
        jnp.stack([jax.random.permutation(jax.random.key(b), stored)[:listed] for b in range(batch)]), axis=1
    )
    start, length = jnp.zeros((batch, HEADS), jnp.int32), jnp.full((batch, HEADS), stored)
    mask = jnp.zeros((batch, stored), bool).at[jnp.arange(batch)[:, None], rows].set(True)
    mask = jnp.broadcast_to(mask[:, None], (batch, HEADS, stored))

    def copied(q: Any, k: Any, v: Any, rows: Any) -> Any:
        kept = (jnp.take_along_axis(x, rows[:, :, None, None], axis=1) for x in (k, v))
        return jax.nn.dot_product_attention(q[:, None], *kept)

    count = jnp.full(batch, listed)
    programs = {
        "all entries": partial(jax.jit(decode_attention), q, k, v, start, length),
        "core, operator": partial(jax.jit(core_attention), q, k, v, start, length, rows, count, length),
        "core, copied": partial(jax.jit(copied), q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), rows),
        "core, masked": partial(
            jax.jit(lambda q, k, v, start, length, mask: decode_attention(q, k, v, start, length, valid=mask)),
            q, k, v, start, length, mask,
        ),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):  # the first compiles
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program())
            if number:
                times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * float(np.median(taken)) for name, taken in times.items()}


def parser() -> argparse.ArgumentParser:
    """The options of this command."""
    made = OneLineParser(prog="python -m benchmarks.core_attention", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8], metavar="B", help="numbers of rows")
    made.add_argument("--stored", type=int, default=2880, metavar="S", help="stored entries")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="measurements of each")
    made.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32 on a CPU")
    made.add_argument("--out", type=Path, metavar="JSON", help="file of results, from which a run resumes")
    return made


def run(args: argparse.Namespace) -> None:
    """Measures all batch sizes and prints medians of alternating rounds, in milliseconds."""
    dtype, results = args.dtype or default_dtype(), Results(args.out, " ".join(sys.argv))
    table: Table | None = None
    for batch in tqdm(args.batch, unit="batch"):
        cell = {"batch": batch, "stored": args.stored, "dtype": dtype}
        if results.find(cell) is None:
            results.add(cell, {"milliseconds": measure(batch, args.stored, jnp.dtype(dtype), args.rounds)})
        times = (results.find(cell) or {})["milliseconds"]
        table = table or Table("batch", *times, title=f"milliseconds, {SHARE:.0%} of {args.stored} entries")
        table.add_row(str(batch), *(f"{value:.3f}" for value in times.values()))
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parser().parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
