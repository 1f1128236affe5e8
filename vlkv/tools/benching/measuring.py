"""Measures policies and the full cache in one run: all are compiled first, then run alternately; medians of rounds.

Alternating spreads other load on the machine over all policies, so that ratios are meaningful on shared cores too.

Axes: B batch · S new tokens.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.policies import Policy
from vlkv.sharding.placement import place_inputs
from vlkv.terminal import progress_bar
from vlkv.tools.benching.programs import SEED, Pair, compile_pair
from vlkv.tools.benching.results import Results, identity
from vlkv.tools.benching.settings import Setting, Subject, label, make_inputs, with_full

Tick = Callable[[str], None]
Cell = tuple[Setting, Policy]


def measure(
    params: Model,
    cells: Sequence[Cell],
    *,
    rounds: int,
    tick: Tick = lambda _: None,
    place: Callable[[Any], Any] = jax.device_put,
) -> list[dict[str, Any]]:
    """Measures several policies at one or more settings alternately, `rounds` times after one run to warm up.

    Args:
        params: the model.
        cells: the first policy of each setting, with which the others are compared, is the full cache.
        rounds: number of timed runs of each cell.
        tick: called with a description of each finished step.
        place: places the inputs on devices; on a mesh, call `measure` within `jax.set_mesh`.

    Returns:
        For each cell its seconds and bytes, or `error` if it needs more memory than the device has.
    """
    inputs = {
        setting: place(make_inputs(params.config, setting.batch, setting.prompt, setting.vision))
        for setting in dict.fromkeys(setting for setting, _ in cells)
    }
    names = [f"{setting.batch} x {setting.prompt}, {label(policy)}" for setting, policy in cells]
    rows: list[dict[str, Any]] = [{} for _ in cells]
    pairs: dict[int, Pair] = {}
    for i, (setting, policy) in enumerate(cells):
        with _record_out_of_memory(rows[i]):
            pairs[i] = compile_pair(params, inputs[setting], policy, new=setting.new)
        tick(f"{names[i]}: compiled")
    for i in sorted(pairs, key=lambda i: pairs[i].bytes):  # in order of memory, so that each can raise the peak
        before = _peak_so_far()
        with _record_out_of_memory(rows[i]):
            run_pair(pairs[i], params, inputs[cells[i][0]])
            rows[i]["peak"] = _peak(pairs[i], before)
        tick(f"{names[i]}: warm")
    times: dict[int, list[tuple[float, float, float]]] = {i: [] for i in pairs if "error" not in rows[i]}
    for number in range(rounds):
        order = list(times)
        for i in order[number % len(order) :] + order[: number % len(order)] if order else []:
            times[i].append(run_pair(pairs[i], params, inputs[cells[i][0]])[:3])
            tick(f"{names[i]}: round {number + 1}")
    for i, taken in times.items():
        rows[i] |= _summary(pairs[i], np.array(taken), cells[i][0])
    full, first = ({cell[of]: row for cell, row in zip(cells[::-1], rows[::-1], strict=True)} for of in (0, 1))
    return [
        compared(row, full[setting]) | beside(row, first[policy], cells[0][0])
        for (setting, policy), row in zip(cells, rows, strict=True)
    ]


def run_pair(pair: Pair, params: Model, inputs: Any) -> tuple[float, float, float, np.ndarray]:
    """Seconds of prefill and of decoding, entries kept per layer, and the logits of the first new token."""
    begin = time.perf_counter()
    cache, logits = jax.block_until_ready(pair.prefill.run(params, inputs, SEED))
    middle = time.perf_counter()
    jax.block_until_ready(pair.decode.run(params, cache, logits))
    end = time.perf_counter()
    return middle - begin, end - middle, float(jnp.mean(cache.counts)), np.asarray(logits)


def _summary(pair: Pair, times: np.ndarray, setting: Setting) -> dict[str, Any]:
    prefill, decode, kept = np.median(times, axis=0)
    return {
        "prefill_seconds": float(prefill),
        "decode_seconds": float(decode),  # of S - 1 steps: the prefill gives the first token
        "step_seconds": float(decode / (setting.new - 1)),
        "tokens_per_second": float(setting.batch * (setting.new - 1) / decode),
        "kept_per_layer": float(kept),
        "cache_bytes": pair.cache_bytes,
        "first_call_seconds": round(pair.first_call_seconds, 3),
        "compile_seconds": round(pair.prefill.compile_seconds + pair.decode.compile_seconds, 3),
        "prefill_times": [float(x) for x in times[:, 0]],
        "decode_times": [float(x) for x in times[:, 1]],
    }


def compared(row: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """Adds the full cache's figures to a row, and the ratios to them: the median over the rounds."""
    if row is full or "error" in row or "error" in full:
        return row
    same = row["peak"]["source"] == full["peak"]["source"]
    peak, of_full = (each["peak"]["bytes" if same else "planned"] for each in (row, full))
    ratios = {
        **_ratios(row, full),
        "cache": row["cache_bytes"] / full["cache_bytes"],
        "peak": peak / of_full if of_full else None,
    }
    shown = ("prefill_seconds", "decode_seconds", "tokens_per_second", "cache_bytes", "peak")
    return {**row, "full": {name: full[name] for name in shown}, "to_full": ratios}


def beside(row: dict[str, Any], first: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """The ratios of times to those of the same policy at the first setting, if there are several settings."""
    if row is first or "error" in row or "error" in first:
        return {}
    return {"to_first": {"batch": setting.batch, "prompt": setting.prompt, **_ratios(row, first)}}


def _ratios(row: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(np.median(np.array(row[f"{name}_times"]) / other[f"{name}_times"]))
        for name in ("prefill", "decode")
    }


def _peak_so_far() -> int | None:
    """The device's peak memory in bytes so far; None if it does not report it (a CPU)."""
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    return stats.get("peak_bytes_in_use") if stats else None


def _peak(pair: Pair, before: int | None) -> dict[str, Any]:
    """Peak memory: measured if this run has raised the device's peak, else as planned by the compiler."""
    after = _peak_so_far()
    if before is not None and after is not None and after > before:
        return {"bytes": after, "source": "device.memory_stats", "planned": pair.bytes}
    return {"bytes": pair.bytes, "source": "compiled.memory_analysis", "planned": pair.bytes}


def measure_missing(
    work: Sequence[tuple[Subject, Setting, Sequence[Policy]]], results: Results, *, rounds: int, together: bool = False
) -> None:
    """Measures what `results` lack, setting by setting; the full cache is measured again with the new ones.

    `work` has models, settings and policies. If `together`, all settings of the one model are measured alternately.
    """
    cell_of = partial(identity, together=together)
    todo: list[tuple[Subject, list[Cell], list[Cell]]] = []  # a model, what is absent, and what is run for it
    for subject, setting, contestants in work:
        new = [policy for policy in contestants if results.find(cell_of((subject, setting, policy))) is None]
        if new or together:
            running = with_full(contestants if together else new)
            todo.append((subject, [(setting, policy) for policy in new], [(setting, policy) for policy in running]))
    if together:
        everything = [cell for _, _, cells in todo for cell in cells]
        lacking = [cell for _, cells, _ in todo for cell in cells]
        todo = [(work[0][0], lacking, everything)] if lacking else []
    for subject, *_ in todo:
        subject.check_fits()
    steps = sum(len(cells) * (2 + rounds) for *_, cells in todo)
    with progress_bar("measuring", steps, hidden=not todo or jax.process_index() > 0) as advance:
        params, name = None, None
        for subject, absent, cells in todo:
            if name != subject.name:
                params = None  # frees the previous model before the next is loaded
                params, name = subject.params(), subject.name
            assert params is not None
            place = jax.device_put if subject.mesh is None else partial(place_inputs, mesh=subject.mesh)
            rows = measure(params, cells, rounds=rounds, tick=lambda text: advance(text=text), place=place)
            for cell, row in zip(cells, rows, strict=True):
                if cell in absent:
                    results.add(cell_of((subject, *cell)), row)


@contextlib.contextmanager
def _record_out_of_memory(into: dict[str, Any]) -> Any:
    """Stores "out of memory" as the result, as the papers' tables do; raises all other errors."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise
        into["error"] = "out of memory"
