"""A-VL, Figure 8: attention to 30 % of the stored entries, by its operator, by copying them, and by masking.

The figure has bars without numbers, so only our numbers are shown: sizes of LLaVA-1.6-7B, one layer; the paper used an
A40.

Axes: B batch · N query heads · K key heads · H head dim · S stored entries.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from pallas_kernels import core_attention, decode_attention
from vlkv.benching import machine
from vlkv.benching.results import Results
from vlkv.benching.subjects import default_dtype
from vlkv.errors import InputError

HEADS, HEAD_DIM, STORED, SHARE = 32, 128, 2880, 0.3
BATCHES = (1, 2, 4, 8)


def run(args: argparse.Namespace, console: Console, results: Results) -> Any:
    """Measures all batch sizes and prints medians of alternating rounds, in milliseconds."""
    if args.model is not None or (args.prompt is not None and len(args.prompt) != 1):
        raise InputError(
            "--preset a-vl-figure-8 measures one layer of the paper's model: no --model, and at most one --prompt"
        )
    stored, dtype = (args.prompt or [STORED])[0], args.dtype or default_dtype()
    batches = args.batch or BATCHES
    if args.dry_run:
        for batch in batches:
            size = 2 * batch * stored * HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize
            console.print(f"batch {batch}: {stored} entries, {size / 2**20:.0f} MiB of keys and values")
        return None
    for batch in tqdm(batches, unit="batch"):
        cell = {"preset": "a-vl-figure-8", "batch": batch, "stored": stored, "dtype": dtype}
        if results.find(cell) is None:
            results.add(cell, {"milliseconds": measure(batch, stored, jnp.dtype(dtype), args.rounds)})
    rows = [row for row in results.rows if row["cell"].get("preset") == "a-vl-figure-8"]
    names = list(rows[0]["milliseconds"])
    table = Table("batch", *names, title=f"milliseconds, {SHARE:.0%} of {stored} entries; paper: A40, bars only")
    for row in rows:
        table.add_row(str(row["cell"]["batch"]), *(f"{row['milliseconds'][name]:.3f}" for name in names))
    console.print(table)
    return {"machine": machine.describe(), "rows": rows} if args.json else None


def measure(batch: int, stored: int, dtype: Any, rounds: int) -> dict[str, float]:
    """Milliseconds of attention to all entries, to the core by its operator, to a copy of the core, and with a mask."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, HEADS, HEAD_DIM), dtype)
    k, v = (jax.random.normal(key, (batch, stored, HEADS, HEAD_DIM), dtype) for key in keys[1:])
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
        "core, copied out": partial(jax.jit(copied), q, k, v, rows),
        "core, others masked": partial(
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
