"""Searches block sizes for this device and writes the table that the kernels read.

    python -m benchmarks.tune [--quick] [--dry]

The sizes of an implementation are found by running it, because it looks them up in the table. Each size is halved and
doubled as long as that is faster by more than 3 %. Candidates and the best sizes so far are timed alternately, by
`benchmarks.clock`; candidates that do not compile or run are skipped. The table (`pallas_kernels/tuning/<device>.json`)
contains only sizes that beat the defaults. Shapes are those of `benchmarks.kernels`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import clock
from benchmarks.kernels import CORE, DECODE, MASS, MASS_ROWS, Sizes, attempt, names, whole
from pallas_kernels import attention_mass, attention_mass_rows, core_attention, decode_attention, tuning

BETTER = 0.97  # a candidate must take less than this share of the best time so far


def main() -> None:
    """Tunes every op, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to check that it runs")
    parser.add_argument("--dry", action="store_true", help="print the table, do not write it")
    args = parser.parse_args()
    sizes = Sizes.here(args.quick)
    table: dict[str, dict[str, int]] = {}
    for runs in workloads(sizes):
        table |= tune(runs, sizes.rounds)
    text = json.dumps(table, indent=1, sort_keys=True) + "\n"
    print(text)
    if not args.dry:
        path = tuning.path(jax.devices()[0].device_kind)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


Make = Callable[[], clock.Program]


def workloads(sizes: Sizes) -> list[list[Make]]:
    """For every op and implementation, functions that trace and compile the programs to time.

    Decoding has a short and a long segment of every model, because one table is used for all of them.
    """
    found: list[list[Make]] = []
    for op, implementations in ((decode_attention, DECODE), (core_attention, CORE)):
        for name in names(implementations):
            found.append([
                partial(decoding, op, name, sizes, model, share) for model in sizes.models for share in (0.02, 0.5)
            ])  # fmt: skip
    for score, implementations in ((attention_mass, MASS), (attention_mass_rows, MASS_ROWS)):
        found += [[partial(scoring, score, name, sizes)] for name in names(implementations)]
    return found


def decoding(op: Any, name: str, sizes: Sizes, model: tuple[int, int, int], share: float) -> clock.Program:
    """Compiles decode_attention or core_attention over a share of the prompt."""
    q, k, v = whole(sizes, *model, sizes.tokens)
    per_head = (model[0], model[2])
    count = int(share * sizes.tokens)
    arguments: tuple = jnp.zeros(per_head, jnp.int32), jnp.full(per_head, count)
    if op is core_attention:  # every second slot, of twice as many
        rows = jnp.tile(jnp.arange(0, 2 * count, 2), (model[0], 1))
        ends = jnp.full(per_head, 2 * count)
        arguments = arguments[0], ends, rows, jnp.full(model[0], count), ends
    moved = 2 * count * model[0] * model[2] * sizes.head_dim * k.dtype.itemsize
    run = partial(op, implementation=name)
    return clock.repeated(run, q, k, v, *arguments, moved=moved, spread_bytes=sizes.spread)


def scoring(op: Any, name: str, sizes: Sizes) -> clock.Program:
    """Compiles attention_mass or attention_mass_rows of all rows and keys."""
    _, heads, kv_heads = sizes.models[-1]
    q = jnp.ones((heads, sizes.prefill, sizes.head_dim), sizes.dtype)
    k = jnp.ones((kv_heads, sizes.prefill, sizes.head_dim), sizes.dtype)
    weight = {"row_weight" if op is attention_mass else "key_weight": jnp.ones((1, sizes.prefill))}
    mask = jnp.ones(sizes.prefill, bool)
    run = partial(op, key_mask=mask, **weight, implementation=name)
    moved = q.nbytes + k.nbytes
    return clock.repeated(run, q, k, moved=moved, estimate=1e-3, spread_bytes=sizes.spread)


def tune(runs: list[Make], rounds: int) -> dict[str, dict[str, int]]:
    """The sizes of one implementation that beat its defaults, {} if none does."""
    with tuning.trying({}) as asked:
        best = prepare(runs)
        sizes = {op: dict(found) for op, found in asked.items()}
    if best is None:
        return {}
    changed: dict[str, dict[str, int]] = {}
    for op, options in list(sizes.items()):
        for name in options:
            for factor in (0.5, 2.0):
                while (size := int(sizes[op][name] * factor)) >= 1:
                    candidate = {**sizes, op: {**sizes[op], name: size}}
                    made = prepare(runs, candidate)
                    if made is None or not faster(made, best, rounds):
                        break
                    best, sizes = made, candidate
                    changed[op] = sizes[op]
                    print(f"{op}: {sizes[op]}", flush=True)
    return changed


def prepare(runs: list[Make], sizes: Mapping[str, Mapping[str, int]] | None = None) -> list[clock.Program] | None:
    """Compiles all workloads with these sizes and runs them once; None if one of them fails."""
    with tuning.trying(sizes or {}):
        made = [attempt(run) for run in runs]
        failed = any(isinstance(one, str) or isinstance(attempt(one.seconds), str) for one in made)
        return None if failed else made


def faster(new: list[clock.Program], old: list[clock.Program], rounds: int) -> bool:
    """Whether the new programs take less time (geometric mean over the workloads); timed alternately."""
    ratios = []
    for pair in zip(new, old, strict=True):
        times = [[one.seconds() for one in pair] for _ in range(rounds)]
        first, second = np.median(np.array(times), axis=0)
        ratios.append(first / second)
    return float(np.exp(np.mean(np.log(ratios)))) < BETTER


if __name__ == "__main__":
    main()
