"""Checks and measures a new GPU in ten minutes: `python -m benchmarks.first_contact [--out FILE.jsonl]`.

    python -m benchmarks.first_contact --dry-run        the same steps, tiny, on a CPU with kernels interpreted
    python -m benchmarks.first_contact --coordinator HOST:PORT --processes N --process I       on several hosts

Every result is written at once as one JSON line, so that an interruption loses nothing. It needs no git, network or
torch. The steps, the most important first: versions, limits of the device (and of the network between devices), every
kernel compared with float64 on the host, the demo model's tokens compared with the CPU's, decode attention, prefill
attention, the cost of each method's scores, a 7B model with random weights, and a profile of decoding.

Each group of steps runs in its own process with a time limit, because a kernel that reads invalid memory ends its
process. The group is then started again after the item that caused it. With several hosts there is one process per
host, which runs all steps; process 0 writes.

Lines: {"step", "item", "at": seconds since the start, ...}. An item without a result has `failed` (the end of the
traceback) or `skipped`. A check has `passed`.

Axes: B batch · T prompt · N query heads · K key heads · H head dim · P pool slots.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import glob
import gzip
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "first_contact.jsonl"
GROUPS = (  # steps of one process, and their share of 600 seconds; the next group gets the time that one leaves
    (("versions", "limits", "collectives"), 60),
    (("kernels",), 130),
    (("tokens",), 60),
    (("decode",), 70),
    (("prefill",), 50),
    (("scores",), 75),
    (("model", "profile"), 140),
)
ATTEMPTS = 6  # starts of a group whose process fails
DRY_FLAGS = " --xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"  # halves compile time


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    copy_bytes: int = 2**31
    product: int = 8192
    collective_bytes: tuple[int, ...] = (2**20, 2**26, 2**29)
    batches: tuple[int, ...] = (1, 8, 16, 256)
    entries: tuple[int, ...] = (870, 8192, 32768)
    pool_bytes: int = 6 * 2**30
    heads: tuple[int, int, int] = (28, 4, 128)  # N, K, H of Qwen2-7B
    prompts: tuple[int, ...] = (2048, 8192, 32768)
    methods: tuple[str, ...] = (
        "AirCache", "SnapKV", "H2O", "PrefixKV", "VLCache", "AVL", "CSP", "RoCo", "LookM", "ElasticCache", "PyramidKV",
    )  # fmt: skip
    model: str = "llava-onevision-7b"
    scored: tuple[int, int, int] = (2, 8192, 64)  # B, T and text of the prompts whose scores are timed
    setting: tuple[int, int, int, int] = (8, 8192, 64, 64)  # B, T, text, new tokens
    answers: tuple[str, ...] = ("Full", "SnapKV", "H2O", "AVL")  # policies whose tokens are compared
    new: int = 24
    repeats: int = 5
    dtype: str = "bfloat16"


DRY = Sizes(
    copy_bytes=2**20, product=64, collective_bytes=(2**12,), batches=(1, 2), entries=(20, 48), pool_bytes=2**16,
    heads=(4, 2, 64), prompts=(64,), methods=("AirCache", "H2O"), model="tiny", scored=(2, 48, 16),
    setting=(2, 48, 16, 4), answers=("H2O",), new=3, repeats=1, dtype="float32",
)  # fmt: skip


# --- the journal ----------------------------------------------------------------------------------------------------


class Journal:
    """A file of JSON lines, each written in one call. `path` None: nothing is written."""

    def __init__(self, path: Path | None, began: float) -> None:
        self.path, self.began = path, began

    def write(self, fact: dict[str, Any]) -> None:
        """Adds one line."""
        if self.path is None:
            return
        fact = {**fact, "at": round(time.time() - self.began, 1)}
        line = json.dumps(_finite(fact), default=str, allow_nan=False) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())  # one call, so that a kill cannot leave part of a line
            os.fsync(file)
        finally:
            os.close(file)
        print(line[:300].rstrip(), flush=True)

    def lines(self) -> list[dict[str, Any]]:
        """All lines so far."""
        if self.path is None or not self.path.is_file():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@dataclasses.dataclass
class Run:
    """What a step needs: sizes, deadline, journal, and results of earlier steps."""

    sizes: Sizes
    dry: bool
    journal: Journal
    deadline: float
    marker: Path | None = None  # file with the current item, for the parent process
    keep: dict[str, Any] = dataclasses.field(default_factory=dict)  # objects that later steps use

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.time()

    def items(self, step: str, items: Iterable[tuple[str, Any]], do: Callable[[Any], dict[str, Any]]) -> None:
        """Writes a line for each item: the result of `do`, its error, or that no time was left."""
        done = {line.get("item") for line in self.journal.lines() if line["step"] == step}
        for name, item in items:
            if name in done:
                continue
            if self.left() < 2:
                self.journal.write({"step": step, "item": name, "skipped": "no time left"})
                continue
            if self.marker is not None:
                self.marker.write_text(json.dumps({"step": step, "item": name}))
            begin = time.time()
            try:
                found = do(item)
            except Exception as error:
                found = failure(error)
            self.journal.write({"step": step, "item": name, **found, "took": round(time.time() - begin, 2)})

    def limit(self, name: str) -> float | None:
        """A limit of the device from the step "limits"; None if not measured."""
        found = (line.get("per_second") for line in self.journal.lines() if line.get("item") == name)
        return next((x for x in found if x), None)


def _finite(x: Any) -> Any:
    """Converts infinities and NaN to strings, because JSON has no such numbers."""
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def failure(error: BaseException) -> dict[str, str]:
    """The fields of a line for an error, with the end of the traceback."""
    text = "".join(traceback.format_exception(error))
    return {"failed": f"{type(error).__name__}: {error}"[:400], "traceback": text[-1500:]}


# --- steps ----------------------------------------------------------------------------------------------------------


def versions(run: Run) -> None:
    """Packages, device, commit and driver."""
    import jax

    def packages(_: Any) -> dict[str, Any]:
        from importlib.metadata import PackageNotFoundError, version

        found = {"python": platform.python_version()}
        for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "flax", "numpy"):
            with contextlib.suppress(PackageNotFoundError):
                found[name] = version(name)
        return found

    def device(_: Any) -> dict[str, Any]:
        first = jax.local_devices()[0]
        stats = first.memory_stats() or {}
        return {
            "platform": first.platform, "kind": first.device_kind, "devices": jax.device_count(),
            "processes": jax.process_count(), "memory_bytes": stats.get("bytes_limit"),
            "compute_capability": getattr(first, "compute_capability", None), "cores": os.cpu_count(),
        }  # fmt: skip

    def commit(_: Any) -> dict[str, Any]:
        from vlkv.tools.benching import machine

        return {"commit": machine.commit(), "dry_run": run.dry}

    def driver(_: Any) -> dict[str, Any]:
        asked = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=15,
        )  # fmt: skip
        return {"asked": asked, "said": done.stdout.strip()}

    found = [("packages", packages), ("device", device), ("commit", commit)]
    run.items("versions", [*found, *([] if run.dry else [("driver", driver)])], lambda do: do(None))


def limits(run: Run) -> None:
    """The device's highest rates of copying, reading, and products of bfloat16 matrices."""
    from benchmarks import clock

    def measure(what: tuple[Callable[..., Any], int]) -> dict[str, Any]:
        rate, timing = what[0](what[1], 2 if run.dry else None)
        return {"per_second": rate, "size": what[1], **timing.row()}

    size = run.sizes.copy_bytes
    items = [("copy", (clock.copy_bandwidth, size)), ("read", (clock.read_bandwidth, size)),
             ("product", (clock.product_rate, run.sizes.product))]  # fmt: skip
    run.items("limits", items, measure)


def collectives(run: Run) -> None:
    """Sums, gathers and exchanges over all devices of all processes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()
    if len(devices) == 1:
        run.items("collectives", [("none", None)], lambda _: {"skipped": "one device"})
        return
    mesh = Mesh(np.array(devices), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    bodies = {
        "psum": lambda x: jax.lax.psum(x, "x") / len(devices),
        "all_gather": lambda x: jax.lax.all_gather(x, "x", tiled=True)[: x.shape[0]],
        "all_to_all": lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
        "ppermute": lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % len(devices)) for i in range(len(devices))]),
    }

    def measure(what: tuple[str, int]) -> dict[str, Any]:
        name, size = what
        count = size // 4 // len(devices) * len(devices)  # on each device
        x = jax.jit(lambda: jnp.ones(count * len(devices)), out_shardings=split)()
        body = jax.shard_map(bodies[name], mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"),
                             check_vma=False)  # fmt: skip
        turn = jax.jit(body)
        x = jax.block_until_ready(turn(x))
        repeats = 3 if run.dry else 20
        begin = time.perf_counter()
        for _ in range(repeats):
            x = turn(x)
        jax.block_until_ready(x)
        seconds = (time.perf_counter() - begin) / repeats
        return {"bytes_per_device": 4 * count, "devices": len(devices), "processes": jax.process_count(),
                "microseconds": round(1e6 * seconds, 1),
                "gigabytes_per_second": round(4 * count / seconds / 1e9, 3)}  # fmt: skip

    cells = [(name, size) for size in run.sizes.collective_bytes for name in bodies]
    run.items("collectives", [(f"{name} {size}", (name, size)) for name, size in cells], measure)


def kernels(run: Run) -> None:
    """Compares every kernel with float64; several threads compile the next kernels ahead."""
    from benchmarks import checks
    from pallas_kernels.dispatch import target_platform

    platform = target_platform()
    wanted = _dry_cases() if run.dry else list(checks.cases())
    done = {line.get("item") for line in run.journal.lines() if line["step"] == "kernels"}
    wanted = [case for case in wanted if case.name not in done]
    with concurrent.futures.ThreadPoolExecutor(max(2, min(8, (os.cpu_count() or 2) - 2))) as pool:
        ahead = 12  # not more, because prepared cases hold arrays
        prepared: dict[str, Any] = {}

        def check(i: int) -> dict[str, Any]:
            for case in wanted[i : i + ahead]:
                if case.name not in prepared:
                    prepared[case.name] = pool.submit(checks.prepare, case, platform)
            try:
                found = prepared.pop(wanted[i].name).result().run()
            except ValueError as error:
                if "cannot run this" not in str(error):
                    raise
                return {"skipped": str(error)[:400]}  # a head size that this device's kernel does not take
            del found["case"]
            return found

        run.items("kernels", [(case.name, i) for i, case in enumerate(wanted)], check)
        pool.shutdown(cancel_futures=True)


def _dry_cases() -> list[Any]:
    from benchmarks.checks import Case

    return [
        Case("decode_attention", 64, 2, "float32", 96, full=True),
        Case("core_attention", 80, 7, "bfloat16", 96, softmax_n=1.0),
        Case("attention_mass", 64, 1, "float32", 48, statistic="square"),
        Case("attention_mass_rows", 64, 8, "bfloat16", 48, full=True),
        Case("prefill_attention", 64, 2, "bfloat16", 96),
    ]


def tokens(run: Run) -> None:
    """Compares the demo model's answers on this device and on the host's CPU, in float32 at full precision."""
    import jax
    import numpy as np

    import vlkv
    from vlkv.mini import CHECKPOINT, pages

    params, processor = vlkv.load(CHECKPOINT)
    (asked,) = pages.held_out(1)
    inputs = processor(asked.image, asked.question)
    here, host = jax.local_devices()[0], jax.local_devices(backend="cpu")[0]

    def answer(name: str) -> dict[str, Any]:
        policy = make_policy(name, 0.2)
        sampling = vlkv.Greedy(max_new_tokens=run.sizes.new)

        def on(device: Any) -> Any:
            with jax.default_matmul_precision("highest"):
                generate = jax.jit(
                    lambda params, inputs: vlkv.generate(params, inputs, policy=policy, sampling=sampling)
                )
                output = generate(jax.device_put(params, device), jax.device_put(inputs, device))
            return np.asarray(output.tokens[0])

        with concurrent.futures.ThreadPoolExecutor(1 if here == host else 2) as pool:
            got, want = pool.map(on, (here, host))
        same = int(np.argmin(got == want)) if not np.array_equal(got, want) else len(want)
        return {"passed": bool(same == len(want)), "tokens": len(want), "equal_until": same, "device": here.device_kind,
                "answer": processor.decode(got)[:200]}  # fmt: skip

    run.items("tokens", [(name, name) for name in run.sizes.answers], answer)


def decode(run: Run) -> None:
    """Times decode attention; each call reads another segment of a pool that is larger than the caches."""
    import jax
    import jax.numpy as jnp

    from benchmarks import clock
    from pallas_kernels import decode_attention
    from vlkv.tools.benching.machine import memory_bytes

    heads, kv_heads, head_dim = run.sizes.heads
    slot_bytes = 2 * kv_heads * head_dim * jnp.dtype(run.sizes.dtype).itemsize
    copy, read = run.limit("copy"), run.limit("read")
    pools: dict[tuple[int, ...], Any] = {}

    def measure(cell: tuple[int, int]) -> dict[str, Any]:
        batch, entries = cell
        slots = max(-(-entries // 16) * 16, run.sizes.pool_bytes // (batch * slot_bytes) // 16 * 16)
        if batch * slots * slot_bytes > 0.6 * (memory_bytes() or 2**60):
            return {"skipped": f"{batch * slots * slot_bytes} bytes are more than 0.6 of the memory"}
        shape = batch, kv_heads, slots, head_dim
        if shape not in pools:
            pools.clear()
            make = jax.jit(lambda key: jax.random.normal(key, shape, run.sizes.dtype))
            pools[shape] = make(jax.random.key(0)), make(jax.random.key(1))
        k, v = pools[shape]
        length = jnp.full((batch, kv_heads), entries)
        moved = batch * entries * slot_bytes
        calls = 3 if run.dry else clock.calls_for(moved / 3e12 + 5e-6)
        starts = jnp.asarray(clock.rotating(calls, slots, entries))

        def step(q: Any, start: Any, k: Any, v: Any) -> Any:
            begin = jnp.broadcast_to(start, length.shape)
            out, _ = decode_attention(q, k, v, begin, length, max_length=-(-entries // 16) * 16)
            return out.astype(q.dtype)

        q = jax.random.normal(jax.random.key(2), (batch, heads, head_dim), run.sizes.dtype)
        timing = clock.chained(step, q, k, v, turns=starts, calls=calls, repeats=run.sizes.repeats)
        share = {
            f"share_of_{name}": round(moved / timing.seconds / rate, 3)
            for name, rate in (("copy", copy), ("read", read)) if rate
        }  # fmt: skip
        return {"batch": batch, "entries": entries, "bytes": moved, "pool_bytes": batch * slots * slot_bytes,
                **timing.row(moved=moved), **share}  # fmt: skip

    cells = [(batch, entries) for batch in run.sizes.batches for entries in run.sizes.entries]
    run.items("decode", [(f"B={b} entries={n}", (b, n)) for b, n in cells], measure)


def prefill(run: Run) -> None:
    """Times prefill attention of one row, with the device's kernel and with XLA's blocks."""
    import jax

    from benchmarks import checks, clock
    from pallas_kernels import prefill_attention
    from pallas_kernels.dispatch import target_platform

    heads, kv_heads, head_dim = run.sizes.heads
    table = checks.KERNELS[target_platform()]
    names = table.get("prefill_attention", table[None]), "xla"

    def measure(cell: tuple[int, str]) -> dict[str, Any]:
        length, name = cell
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = [(1, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
        q, k, v = (jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True))
        operations = 2 * heads * length**2 * head_dim  # causal: half of the pairs, two products, two operations
        calls = 2 if run.dry else clock.calls_for(operations / 3e14)

        def step(q: Any, _: Any, k: Any, v: Any) -> Any:
            return prefill_attention(q, k, v, implementation=name)

        timing = clock.chained(step, q, k, v, calls=calls, repeats=run.sizes.repeats)
        rate = run.limit("product")
        share = {"share_of_product": round(operations / timing.seconds / rate, 3)} if rate else {}
        return {"tokens": length, "implementation": name, **timing.row(operations=operations), **share}

    cells = [(length, name) for length in run.sizes.prompts for name in names]
    run.items("prefill", [(f"T={length} {name}", (length, name)) for length, name in cells], measure)


def scores(run: Run) -> None:
    """Times what each method adds to the prefill of two layers of the model: scores, selection and packing."""
    import jax
    import numpy as np

    import vlkv
    from benchmarks import clock
    from vlkv.tools.benching.shapes import make_inputs
    from vlkv.tools.benching.subjects import find

    subject = find(run.sizes.model, dtype=run.sizes.dtype)
    config = dataclasses.replace(subject.config, decoder=dataclasses.replace(subject.config.decoder, layers=2))
    params = vlkv.init(config, jax.random.key(0), dtype=subject.dtype)
    batch, prompt, text = run.sizes.scored
    inputs = jax.device_put(make_inputs(config, batch, prompt, prompt - text))
    alone: list[float] = []

    def measure(name: str) -> dict[str, Any]:
        policy = make_policy(name, 0.1)
        key = jax.random.key(0)
        begin = time.perf_counter()
        compiled = (
            jax.jit(lambda p, x: vlkv.prefill(p, x, policy, new_tokens=16, key=key)).lower(params, inputs).compile()
        )
        compile_seconds = time.perf_counter() - begin
        times = [clock.run_seconds(compiled, params, inputs) for _ in range(run.sizes.repeats + 1)][1:]
        seconds = float(np.median(times))
        if name == "Full":
            alone.append(seconds)
        return {"layers": 2, "batch": batch, "prompt": prompt, "milliseconds": round(1e3 * seconds, 3),
                "compile_seconds": round(compile_seconds, 2),
                **({"added_share_of_prefill": round(seconds / alone[0] - 1, 4)} if alone else {})}  # fmt: skip

    alone += [line["milliseconds"] / 1e3 for line in run.journal.lines()
              if line["step"] == "scores" and line.get("item") == "Full" and "milliseconds" in line]  # fmt: skip
    run.items("scores", [(name, name) for name in ("Full", *run.sizes.methods)], measure)


def make_policy(name: str, keep: float) -> Any:
    """A policy by its name; A-VL's core is half of what it keeps."""
    from vlkv import policies

    options = {"Full": {}, "AVL": {"keep": keep, "core": keep / 2}}.get(name, {"keep": keep})
    return policies.make(name, **options)


def model(run: Run) -> None:
    """Times the whole model with random weights: the full cache, then 10 %."""
    from benchmarks.roofline import shares
    from vlkv import policies
    from vlkv.tools.benching.measuring import measure
    from vlkv.tools.benching.settings import Setting
    from vlkv.tools.benching.subjects import find

    setting = Setting(*run.sizes.setting)

    def cell(policy: Any) -> dict[str, Any]:
        if "params" not in run.keep:
            run.keep["params"] = find(run.sizes.model, dtype=run.sizes.dtype).params()
        (row,) = measure(run.keep["params"], setting, [policy], rounds=2)
        copy, product = run.limit("copy"), run.limit("product")
        if "error" not in row and copy and product:
            row |= shares(run.keep["params"], setting, row, bandwidth=copy, product=product)
        return {"model": run.sizes.model, **dataclasses.asdict(setting), **row}

    run.items("model", [("full cache", policies.Full()), ("AirCache 10%", policies.AirCache(keep=0.1))], cell)


def profile(run: Run) -> None:
    """Profiles ten decoding steps with a compressed cache: which kernels take the time."""
    import jax
    import numpy as np

    import vlkv
    from vlkv import policies
    from vlkv.tools.benching.programs import SEED, compile_pair
    from vlkv.tools.benching.settings import Setting
    from vlkv.tools.benching.shapes import make_inputs
    from vlkv.tools.benching.subjects import find

    def top(_: Any) -> dict[str, Any]:
        if "params" not in run.keep:
            run.keep["params"] = find(run.sizes.model, dtype=run.sizes.dtype).params()
        params, setting = run.keep["params"], Setting(*run.sizes.setting)
        steps = min(10, setting.new - 2)
        inputs = jax.device_put(make_inputs(params.config, setting.batch, setting.prompt, setting.vision))
        pair = compile_pair(params, inputs, policies.AirCache(keep=0.1), new=setting.new)
        cache, _ = pair.prefill.run(params, inputs, SEED)
        token = jax.device_put(np.zeros(setting.batch, np.int32))
        step = jax.jit(vlkv.decode_step, donate_argnums=1).lower(params, cache, token).compile()
        cache, _ = jax.block_until_ready(step(params, cache, token))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                begin = time.perf_counter()
                for _ in range(steps):
                    cache, logits = step(params, cache, token)
                jax.block_until_ready(logits)
                seconds = time.perf_counter() - begin
            found = top_kernels(Path(folder))
        return {"steps": steps, "milliseconds_per_step": round(1e3 * seconds / steps, 3), **found}

    run.items("profile", [("decode", None)], top)


def top_kernels(folder: Path, most: int = 25) -> dict[str, Any]:
    """The kernels of a trace that took most of the time; the host's operations if the trace has no device."""
    events: list[dict[str, Any]] = []
    for file in glob.glob(str(folder / "plugins" / "profile" / "*" / "*.trace.json.gz")):
        events += json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    on_device = {pid for pid, name in names.items() if "/device:" in name}
    spans = [e for e in events if e.get("ph") == "X" and (not on_device or e["pid"] in on_device)]
    streams = [e for e in spans if "Stream" in threads.get((e["pid"], e["tid"]), "")]
    spans = streams or [e for e in spans if not e["name"].startswith("$")]  # "$": a line of Python
    total: dict[str, list[float]] = {}
    for event in spans:
        total.setdefault(event["name"], []).append(event["dur"])
    whole = sum(map(sum, total.values()))
    order = sorted(total, key=lambda name: -sum(total[name]))[:most]
    return {
        "device_events": bool(on_device), "events": len(spans), "milliseconds": round(whole / 1e3, 3),
        "kernels": [{"kernel": name[:120], "calls": len(total[name]), "microseconds": round(sum(total[name]), 1),
                     "share": round(sum(total[name]) / whole, 4)} for name in order],
    }  # fmt: skip


STEPS: dict[str, Callable[[Run], None]] = {
    step.__name__: step
    for step in (versions, limits, collectives, kernels, tokens, decode, prefill, scores, model, profile)
}


def do_steps(run: Run, names: Sequence[str]) -> None:
    """Runs the steps; writes a line for a step that fails as a whole."""
    for name in names:
        try:
            STEPS[name](run)
        except Exception as error:
            run.journal.write({"step": name, "item": None, **failure(error)})


# --- processes ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all steps; returns 0 if every check passed and nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT, help="file of JSON lines, which is overwritten")
    parser.add_argument("--minutes", type=float, default=9.8)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "vlkv_first_contact",
                        help="folder for compiled programs, on a local disk")  # fmt: skip
    parser.add_argument("--coordinator", metavar="HOST:PORT")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int, metavar="I")
    parser.add_argument("--child", type=float, metavar="DEADLINE", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child is not None:
        return _child(args)
    began = time.time()
    for name, value in _environment(args).items():
        os.environ[name] = value
    if args.process in (None, 0):
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("")
    if args.coordinator is not None:
        return _one_of_several(args, began)
    journal = Journal(args.out, began)
    try:
        _watch(args, journal, began + 60 * args.minutes)
    except KeyboardInterrupt:
        journal.write({"step": "end", "failed": "interrupted"})
        return 130
    return _end(journal)


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """Environment of the processes that compute: a cache of compiled programs, and for a dry run the CPU."""
    found = {
        "JAX_COMPILATION_CACHE_DIR": str(args.cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    }  # fmt: skip
    if args.dry_run:
        found |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + DRY_FLAGS}
    return found


def _watch(args: argparse.Namespace, journal: Journal, deadline: float) -> None:
    """Runs each group of steps in its own process until its time is up; starts it again after a crash."""
    total = sum(seconds for _, seconds in GROUPS)
    share = 0.0  # of the whole time, for the groups so far
    for steps, seconds in GROUPS:
        share += seconds / total
        wanted = [name for name in steps if name in args.steps]
        end = journal.began + share * (deadline - journal.began)
        for _ in range(ATTEMPTS if wanted else 0):
            if end - time.time() < 3:
                journal.write({"step": wanted[0], "item": None, "skipped": "no time left"})
                break
            with tempfile.TemporaryDirectory() as folder:
                marker, errors = Path(folder) / "item", Path(folder) / "errors"
                code = _run_child(args, wanted, journal.began, end, marker, errors)
                if code == 0:
                    break
                at = json.loads(marker.read_text()) if marker.is_file() else {"step": wanted[0], "item": None}
                why = "its time was up" if code is None else f"its process ended with {code}"
                text = errors.read_text(errors="replace")[-1500:]
                journal.write({**at, "failed": why, "traceback": text})
            if at["item"] is None:
                break


def _run_child(
    args: argparse.Namespace, steps: list[str], began: float, end: float, marker: Path, errors: Path
) -> int | None:
    """Runs these steps in a process; returns its exit code, or None if its time was up."""
    command = [
        sys.executable, "-m", "benchmarks.first_contact", "--out", str(args.out.resolve()), "--child", str(end - 2),
        "--began", str(began), "--cache", str(args.cache), "--steps", *steps,
        *(["--dry-run"] if args.dry_run else []),
    ]  # fmt: skip
    environment = {**os.environ, "VLKV_FIRST_CONTACT_MARKER": str(marker)}
    with errors.open("w") as file:
        child = subprocess.Popen(command, cwd=ROOT, stderr=file, env=environment, start_new_session=True)
        try:
            return child.wait(max(1.0, end + 3 - time.time()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _child(args: argparse.Namespace) -> int:
    """The process of one group."""
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    marker = Path(os.environ["VLKV_FIRST_CONTACT_MARKER"])
    sizes = DRY if args.dry_run else Sizes()
    do_steps(Run(sizes, args.dry_run, Journal(args.out, args.began), args.child, marker), args.steps)
    sys.stdout.flush()
    os._exit(0)  # does not wait for threads that still compile


def _follow_parent(parent: int) -> None:
    """Ends this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _one_of_several(args: argparse.Namespace, began: float) -> int:
    """One process of a job on several hosts: all run the collectives, only process 0 runs the other steps."""
    import jax

    minutes = max(60, int(60 * args.minutes))
    jax.distributed.initialize(
        args.coordinator, args.processes, args.process, shutdown_timeout_seconds=minutes
    )  # fmt: skip
    first = jax.process_index() == 0
    journal = Journal(args.out if first else None, began)
    run = Run(DRY if args.dry_run else Sizes(), args.dry_run, journal, began + 60 * args.minutes)
    wanted = [name for name in STEPS if name in args.steps and (first or name == "collectives")]
    do_steps(run, wanted)
    code = _end(journal) if first else 0
    jax.distributed.shutdown()
    return code


def _end(journal: Journal) -> int:
    """Writes the last line: how many checks passed and what failed. Returns the exit status."""
    lines = journal.lines()
    checks = [line for line in lines if "passed" in line]
    found = {
        "facts": len(lines), "checks": len(checks), "passed": sum(line["passed"] for line in checks),
        "not_passed": [f"{line['step']}: {line['item']}" for line in checks if not line["passed"]],
        "failures": [f"{line['step']}: {line.get('item')}" for line in lines if "failed" in line],
        "skipped": sum("skipped" in line for line in lines),
    }  # fmt: skip
    journal.write({"step": "end", "item": None, **found})
    return 0 if not found["failures"] and found["passed"] == found["checks"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
