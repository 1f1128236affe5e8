"""Compares speed and memory with transformers and kvpress: same checkpoint, prompt and keep, alternately in one run.

    python -m benchmarks.peers [--all] [--model 110m mini smollm2] [--prompt 640 2368 4672] [--batch 1] [--out JSON]

Needs `pip install '.[peers]'`. torch and jax must have the same kind of device: a CPU with as many threads as cores, or
one GPU. A cell is one model and prompt length: all engines are warmed up, then run alternately, with a pause before
each run, because idle threads of one library spin for a while and slow the other down.
To take less than ten minutes, only the full cache and SnapKV in vlkv and sdpa run in every round; other methods and
eager run once, and not on the longest prompts. --all runs everything in all rounds. Cells that the file contains are
not run again.

A copy and a sum of a buffer that is larger than any cache are timed in the same rounds. "relative to bytes" is the time
of a step relative to the time for moving the bytes of weights and kept cache: at the speed of the copy, and at that of
the sum. "at most" is the latter for a peer: the highest speedup over it if decoding is limited by memory (as for 110m).

The table has medians of prefill seconds and of decoding steps, peak memory above the memory before the run, and the
time of the first call (for vlkv: compiling). torch.compile is not used: it does not work with kvpress' hooks and with
caches that grow.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs GPU memory too

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import vlkv
from benchmarks import torch_side
from vlkv import policies
from vlkv.analysis.cost import step_bytes
from vlkv.errors import InputError
from vlkv.files import write_json
from vlkv.terminal import OneLineParser, guarded, progress_bar
from vlkv.tools.benching import machine
from vlkv.tools.benching.programs import SEED, compile_pair

RESULT = Path(__file__).parent / "results" / "peers.json"
PROMPTS, KEEP, NEW = (640, 2368, 4672), 0.1, 32
_LONG, _LONGEST = 1024, 4096  # longer prompts have fewer rounds; the longest only the most important runs
_COPY = {"cpu": 2**28, "gpu": 2**31}  # bytes of the copied buffer; a GPU copies 2**28 in the time of two dispatches
_PAUSE = 0.25  # seconds; OpenMP's threads spin for 0.2 seconds


def ours(method: str, keep: float) -> policies.Policy:
    """The policy that corresponds to a method of the peers."""
    made: dict[str, Callable[[], policies.Policy]] = {
        "none": policies.Full,
        "snapkv": lambda: policies.SnapKV(keep=keep, window=torch_side.WINDOW),
        "pyramidkv": lambda: policies.PyramidKV(keep=keep, window=torch_side.WINDOW, kernel=5, pooling="avg"),
        "streamingllm": lambda: policies.StreamingLLM(keep=keep),
        "observed": lambda: policies.H2O(keep=keep, recent=0, evict=False),
    }
    return made[method]()


def main() -> int:
    """Measures what is missing, prints the tables, writes the JSON."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        nargs="+",
        default=["110m", "mini"],
        choices=[*torch_side.SIZES, "mini", "smollm2"],
        help="(default: 110m mini)",
    )
    parser.add_argument("--prompt", nargs="+", type=int, default=PROMPTS, metavar="T")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows with equally long prompts (default: 1)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="(default: float32 on a CPU, bfloat16 on a GPU)"
    )
    parser.add_argument("--method", nargs="+", default=list(torch_side.METHODS), choices=torch_side.METHODS)
    parser.add_argument("--keep", type=float, default=KEEP)
    parser.add_argument("--new", type=int, default=NEW, metavar="S", help="tokens per run")
    parser.add_argument("--rounds", type=int, help=f"default: 3, or 2 for prompts over {_LONG} tokens")
    parser.add_argument("--all", action="store_true", help="every method on every prompt, in every round")
    parser.add_argument("--out", type=Path, default=RESULT)
    return guarded(lambda: run(parser.parse_args()))


def run(args: argparse.Namespace) -> None:
    """Measures all cells."""
    torch_side.require()
    few = args.rounds is not None and args.rounds < 1
    if not 0 < args.keep < 1 or args.new < 2 or few or args.batch < 1 or min(args.prompt) <= torch_side.WINDOW:
        raise InputError(f"--keep must lie in (0, 1), --new be at least 2, --rounds and --batch 1 and --prompt over "
                         f"{torch_side.WINDOW}, kvpress' window")  # fmt: skip
    torch_side.use_device(jax.default_backend())
    result: dict[str, Any] = {"command": "python -m benchmarks.peers", "machine": {**machine.describe(),
                              **torch_side.versions()}, "cells": []}  # fmt: skip
    if args.out.is_file():
        result["cells"] = json.loads(args.out.read_text())["cells"]
    for name in args.model:
        cells = [cell_of(args, name, prompt) for prompt in dict.fromkeys(args.prompt)]
        missing = [cell for cell in cells if all(made["cell"] != cell for made in result["cells"])]
        with tempfile.TemporaryDirectory() as work:
            folder = torch_side.make_checkpoint(name, Path(work)) if missing else Path(work)
            for cell in missing:
                rounds = args.rounds or (3 if cell["prompt"] <= _LONG else 2)
                made = measure(folder, cell, args.method, rounds, args.all)
                result["cells"].append({"cell": cell, "commit": machine.commit(), **made})
                args.out.parent.mkdir(parents=True, exist_ok=True)
                write_json(args.out, result)
    show(result)


def cell_of(args: argparse.Namespace, name: str, prompt: int) -> dict[str, Any]:
    """What a cell's results depend on; a batch of 1 and the default dtype are left out."""
    cell = {"model": name, "prompt": prompt, "keep": args.keep, "new": args.new, "methods": args.method,
            "all": args.all}  # fmt: skip
    return cell | ({"batch": args.batch} if args.batch > 1 else {}) | ({"dtype": args.dtype} if args.dtype else {})


def matters(engine: str, method: str) -> bool:
    """Whether this is one of the four main runs: the full cache and SnapKV, in vlkv and in sdpa."""
    return engine in ("vlkv", "sdpa") and method in ("none", "snapkv")


def measure(folder: Path, cell: dict[str, Any], methods: list[str], rounds: int, every: bool) -> dict[str, Any]:
    """Measures one cell."""
    dtype = cell.get("dtype", "float32" if jax.default_backend() == "cpu" else "bfloat16")
    params = vlkv.load_params(folder, dtype=dtype)
    short = every or cell["prompt"] <= _LONGEST
    attentions = {
        method: [name for name in torch_side.METHODS[method] if short or matters(name, method)]
        for method in methods if short or matters("vlkv", method)
    }  # fmt: skip
    torch_side.free()  # the models of the last cell
    used = sorted(set().union(*attentions.values()))
    peers = {name: torch_side.Peer(folder, name, dtype=dtype) for name in used}
    vocab = params.config.decoder.vocab_size
    batch = cell.get("batch", 1)
    tokens = np.random.default_rng(0).integers(3, vocab, (batch, cell["prompt"]))
    exact = vlkv.Buckets(text=(1, cell["prompt"]))  # without rounding up, because torch does not round up either
    inputs = jax.device_put(vlkv.Inputs.from_hf({"input_ids": tokens}, params.config, exact))
    contestants: dict[str, Callable[[], torch_side.Run]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for method, names in attentions.items():
        name = f"vlkv, {method}"
        pair = compile_pair(params, inputs, ours(method, cell["keep"]), new=cell["new"])
        rows[name] = {"engine": "vlkv", "method": method, "first_call_seconds": round(pair.first_call_seconds, 2)}
        contestants[name] = _runner(pair, params, inputs, cell["new"])
        for attention in names:
            name = f"{attention}, {method}"
            rows[name] = {"engine": attention, "method": method}
            contestants[name] = partial(peers[attention].run, tokens, method, cell["keep"], cell["new"])
    firsts: dict[str, np.ndarray] = {}
    turns = [[name for name in contestants if every or number == 0 or matters(*name.split(", "))]
             for number in range(rounds)]  # fmt: skip
    total = len(contestants) + sum(map(len, turns))
    with progress_bar(f"{cell['model']}, {cell['prompt']}", total) as advance:
        for name, go in contestants.items():
            begin = time.perf_counter()
            run, rows[name]["peak_bytes"] = _peak(go)
            rows[name].setdefault("first_call_seconds", round(time.perf_counter() - begin, 2))
            firsts[name], rows[name]["kept"] = run.first, run.kept
            advance()
        taken: dict[str, list[torch_side.Run]] = {name: [] for name in contestants}
        copies: list[tuple[float, float]] = []
        reads: list[float] = []
        for number, order in enumerate(turns):
            time.sleep(_PAUSE)
            copies.append(_copy())
            reads.append(torch_side.read_speed(_COPY["gpu" if torch_side.on_gpu() else "cpu"]))
            time.sleep(_PAUSE)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                time.sleep(_PAUSE)
                taken[name].append(contestants[name]())
                advance()
    for name, runs in taken.items():
        rows[name] |= {
            "prefill_seconds": float(np.median([r.prefill_seconds for r in runs])),
            "step_seconds": float(np.median([r.step_seconds for r in runs])),
            "prefill_times": [r.prefill_seconds for r in runs],
            "step_times": [r.step_seconds for r in runs],
        }
        rows[name]["tokens_per_second"] = 1 / rows[name]["step_seconds"]
    bandwidth, reading = float(np.median([max(pair) for pair in copies])), float(np.median(reads))
    for name in rows:
        moved = step_bytes(params, batch, rows[name]["kept"] + cell["new"] / 2)
        step = rows[name]["step_seconds"] / moved
        rows[name] |= {
            "step_bytes": int(moved),
            "step_to_bytes_time": step * bandwidth,
            "step_to_read_time": step * reading,
        }
    agree = float(np.abs(firsts["vlkv, none"] - firsts["sdpa, none"]).max()) if "none" in methods else None
    return {
        "dtype": dtype, "copy_bytes_per_second": bandwidth, "copy_by": [list(pair) for pair in copies],
        "read_bytes_per_second": reading, "first_logits_differ_by": agree, "rows": list(rows.values()),
    }  # fmt: skip


def _runner(pair: Any, params: Any, inputs: Any, new: int) -> Callable[[], torch_side.Run]:
    def go() -> torch_side.Run:
        begin = time.perf_counter()
        cache, logits = jax.block_until_ready(pair.prefill.run(params, inputs, SEED))
        middle = time.perf_counter()
        jax.block_until_ready(pair.decode.run(params, cache, logits))
        end = time.perf_counter()
        kept = float(np.asarray(cache.counts).mean())
        return torch_side.Run(middle - begin, (end - middle) / (new - 1), kept, np.asarray(logits))

    return go


_turn = jax.jit(jnp.negative, donate_argnums=0)
_buffers: dict[str, Any] = {}


def _copy() -> tuple[float, float]:
    """Bytes per second (read plus written) of copying a large buffer on one thread, and on all cores.

    On a GPU both are the rate of changing an array in place.
    """
    gpu = jax.default_backend() == "gpu"
    size = _COPY["gpu" if gpu else "cpu"]
    if not _buffers:
        _buffers["from"] = jnp.ones(size // 4, jnp.float32) if gpu else np.ones(size // 4, np.float32)
        _buffers["to"] = None if gpu else np.zeros_like(_buffers["from"])
        _buffers["pool"] = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    best = [0.0, 0.0]
    for _ in range(3):
        for i, parts in enumerate((1, os.cpu_count() or 1)):
            begin = time.perf_counter()
            if gpu:
                _buffers["from"] = jax.block_until_ready(_turn(_buffers["from"]))
            else:
                pieces = (np.array_split(_buffers[name], parts) for name in ("to", "from"))
                list(_buffers["pool"].map(np.copyto, *pieces))
            best[i] = max(best[i], 2 * size / (time.perf_counter() - begin))
    return best[0], best[1]


def _peak(go: Callable[[], torch_side.Run]) -> tuple[torch_side.Run, int | None]:
    """A run, and its peak memory above the memory before: of the process on a CPU, of the allocators on a GPU."""
    if jax.default_backend() == "gpu":
        return _gpu_peak(go)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
    except OSError:
        return go(), None
    before = _status("VmRSS")
    run = go()
    return run, max(0, _status("VmHWM") - before)


def _gpu_peak(go: Callable[[], torch_side.Run]) -> tuple[torch_side.Run, int | None]:
    """torch can reset its peak memory. jax cannot, so jax's counts only if the run raises it."""
    import torch

    device = jax.devices()[0]
    before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    in_use = (device.memory_stats() or {}).get("bytes_in_use", 0)
    run = go()
    after = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return run, int(max(torch.cuda.max_memory_allocated() - held, after - in_use if after > before else 0))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def show(result: dict[str, Any]) -> None:
    """Prints one table per cell; ratios over 1 mean that vlkv is faster."""
    console = Console(width=155)
    for made in result["cells"]:
        cell, rows = made["cell"], made["rows"]
        where = {(row["engine"], row["method"]): row for row in rows}
        copy = made["copy_bytes_per_second"] / 1e9
        read = made.get("read_bytes_per_second", np.nan) / 1e9  # older files do not have it
        table = Table(
            "method", "engine", "kept", "prefill s", "ms/step", "token/s", "peak MiB", "first call s",
            "relative to bytes", "vlkv: prefill", "vlkv: decode", "at most",
            title=f"{cell['model']}, {cell['prompt']} tokens, batch {cell.get('batch', 1)}, keep {cell['keep']:.0%} "
            f"of all tokens, {made['dtype']}, copy {copy:.1f}, read {read:.1f} GB/s",
        )  # fmt: skip
        for row in rows:
            mine, ratios = where["vlkv", row["method"]], ["", "", ""]
            to_read = row.get("step_to_read_time", np.nan)
            if row is not mine:
                ratios = [f"{_ratio(row, mine, name):.2f}x" for name in ("prefill_times", "step_times")]
                ratios.append(f"{to_read:.2f}x")
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
            table.add_row(
                row["method"], row["engine"], f"{row['kept']:.0f}", f"{row['prefill_seconds']:.3f}",
                f"{1e3 * row['step_seconds']:.2f}", f"{row['tokens_per_second']:.1f}", peak,
                f"{row['first_call_seconds']:.1f}", f"{row['step_to_bytes_time']:.2f}, {to_read:.2f}", *ratios,
            )  # fmt: skip
        console.print(table)


def _ratio(theirs: dict[str, Any], mine: dict[str, Any], times: str) -> float:
    """The median over the rounds of the ratio of times."""
    return float(np.median([a / b for a, b in zip(theirs[times], mine[times], strict=False)]))


if __name__ == "__main__":
    raise SystemExit(main())
