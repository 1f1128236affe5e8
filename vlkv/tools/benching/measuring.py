"""Measures policies and the full cache in one run: all are compiled first, then run alternately; medians of rounds.

Alternating spreads other load on the machine over all policies, so that ratios are meaningful on shared cores too.

Axes: B batch · S new tokens.
"""

from __future__ import annotations

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
from vlkv.tools.benching.settings import Setting, label, make_inputs, with_full
from vlkv.tools.benching.subjects import Subject

Tick = Callable[[str], None]


def measure(
    params: Model,
    setting: Setting,
    contestants: Sequence[Policy],
    *,
    rounds: int,
    tick: Tick = lambda _: None,
    place: Callable[[Any], Any] = jax.device_put,
) -> list[dict[str, Any]]:
    """Measures several policies; the others are compared with the first.

    Args:
        params: the model.
        setting: length of the prompt, number of rows and of new tokens.
        contestants: the policies, the full cache first.
        rounds: number of timed runs of each policy, after one run to warm up.
        tick: called with a description of each finished step.
        place: places the inputs on devices; on a mesh, call `measure` within `jax.set_mesh`.

    Returns:
        For each policy its seconds and bytes, or `error` if it needs more memory than the device has.
    """
    inputs = place(make_inputs(params.config, setting.batch, setting.prompt, setting.vision))
    found: list[dict[str, Any]] = [{} for _ in contestants]
    pairs: dict[int, Pair] = {}
    for i, policy in enumerate(contestants):
        with _record_out_of_memory(found[i]):
            pairs[i] = compile_pair(params, inputs, policy, new=setting.new)
        tick(f"{label(policy)}: compiled")
    for i in sorted(pairs, key=lambda i: pairs[i].bytes):  # in order of memory, so that each can raise the peak
        before = _peak_so_far()
        with _record_out_of_memory(found[i]):
            _run(pairs[i], params, inputs)
            found[i]["peak"] = _peak(pairs[i], before)
        tick(f"{label(contestants[i])}: warm")
    times: dict[int, list[tuple[float, float, float]]] = {i: [] for i in pairs if "error" not in found[i]}
    for number in range(rounds):
        order = list(times)
        for i in order[number % len(order) :] + order[: number % len(order)] if order else []:
            times[i].append(_run(pairs[i], params, inputs))
            tick(f"{label(contestants[i])}: round {number + 1}")
    for i, taken in times.items():
        found[i] |= _summary(pairs[i], np.array(taken), setting)
    return [compared(one, found[0]) for one in found]


def _run(pair: Pair, params: Model, inputs: Any) -> tuple[float, float, float]:
    """Seconds of prefill and of decoding, and entries kept per layer."""
    begin = time.perf_counter()
    cache, logits = jax.block_until_ready(pair.prefill.run(params, inputs, SEED))
    middle = time.perf_counter()
    jax.block_until_ready(pair.decode.run(params, cache, logits))
    end = time.perf_counter()
    return middle - begin, end - middle, float(jnp.mean(cache.counts))


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


def compared(one: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """Adds the full cache's figures to a row, and the ratios to them: the median over the rounds."""
    if one is full or "error" in one or "error" in full:
        return one
    same = one["peak"]["source"] == full["peak"]["source"]
    peak, of_full = (row["peak"]["bytes" if same else "planned"] for row in (one, full))
    ratios = {
        "prefill": float(np.median(np.array(one["prefill_times"]) / full["prefill_times"])),
        "decode": float(np.median(np.array(one["decode_times"]) / full["decode_times"])),
        "cache": one["cache_bytes"] / full["cache_bytes"],
        "peak": peak / of_full if of_full else None,
    }
    shown = ("prefill_seconds", "decode_seconds", "tokens_per_second", "cache_bytes", "peak")
    return {**one, "full": {name: full[name] for name in shown}, "to_full": ratios}


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
    work: Sequence[tuple[Subject, Setting, Sequence[Policy]]], results: Results, *, rounds: int
) -> None:
    """Measures what `results` lack, setting by setting; the full cache is measured again with the new ones.

    Args:
        work: model, setting and policies.
        results: to which rows are added.
        rounds: as in `measure`.
    """
    todo = []
    for subject, setting, contestants in work:
        absent = [policy for policy in contestants if results.find(identity((subject, setting, policy))) is None]
        if absent:
            todo.append((subject, setting, absent, with_full(absent)))
    for subject, *_ in todo:
        subject.check_fits()
    steps = sum(len(running) * (2 + rounds) for *_, running in todo)
    with progress_bar("measuring", steps, hidden=not todo or jax.process_index() > 0) as advance:
        params, held = None, None
        for subject, setting, absent, running in todo:
            if held != subject.name:
                params = None  # frees the previous model before the next is loaded
                params, held = subject.params(), subject.name
            assert params is not None

            def tick(text: str, setting: Setting = setting) -> None:
                advance(text=f"{setting.batch} x {setting.prompt}, {text}")

            place = jax.device_put if subject.mesh is None else partial(place_inputs, mesh=subject.mesh)
            found = measure(params, setting, running, rounds=rounds, tick=tick, place=place)
            for policy, row in zip(running, found, strict=True):
                if policy in absent:
                    results.add(identity((subject, setting, policy)), row)


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
