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

import argparse
import concurrent.futures
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

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
from vlkv.tools.benching.measuring import run_pair
from vlkv.tools.benching.programs import Pair, compile_pair
from vlkv.tools.evaluation.peers import available

RESULT = Path(__file__).parent / "results" / "peers.json"
PROMPTS, KEEP, NEW = (640, 2368, 4672), 0.1, 32
_LONG, _LONGEST = 1024, 4096  # longer prompts have fewer rounds; the longest only the most important runs
_COPY = {"cpu": 2**28, "gpu": 2**31}  # bytes of the copied buffer; a GPU copies 2**28 in the time of two dispatches
_PAUSE = 0.25  # seconds; OpenMP's threads spin for 0.2 seconds


def main() -> int:
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
    if (reason := available()) is not None:
        raise InputError(reason)
    few = args.rounds is not None and args.rounds < 1
    if not 0 < args.keep < 1 or args.new < 2 or few or args.batch < 1 or min(args.prompt) <= torch_side.WINDOW:
        least = f"--new be at least 2, --rounds and --batch 1 and --prompt over {torch_side.WINDOW}, kvpress' window"
        raise InputError(f"--keep must lie in (0, 1), {least}")
    torch_side.use_device(jax.default_backend())
    here = {**machine.describe(), **{name: version(name) for name in ("torch", "transformers", "kvpress")}}
    result: dict[str, Any] = {"command": "python -m benchmarks.peers", "machine": here, "cells": []}
    if args.out.is_file():
        result["cells"] = json.loads(args.out.read_text())["cells"]
    for name in args.model:
        cells = [cell_of(args, name, prompt) for prompt in dict.fromkeys(args.prompt)]
        missing = [cell for cell in cells if all(measured["cell"] != cell for measured in result["cells"])]
        with tempfile.TemporaryDirectory() as work:
            folder = torch_side.make_checkpoint(name, Path(work)) if missing else Path(work)
            for cell in missing:
                rounds = args.rounds or (3 if cell["prompt"] <= _LONG else 2)
                measured = measure(folder, cell, rounds)
                result["cells"].append({"cell": cell, "commit": machine.commit(), **measured})
                args.out.parent.mkdir(parents=True, exist_ok=True)
                write_json(args.out, result)
    show(result)


def cell_of(args: argparse.Namespace, name: str, prompt: int) -> dict[str, Any]:
    """What a cell's results depend on; a batch of 1 and the default dtype are left out."""
    setting = {"model": name, "prompt": prompt, "keep": args.keep, "new": args.new}
    cell = {**setting, "methods": args.method, "all": args.all}
    return cell | ({"batch": args.batch} if args.batch > 1 else {}) | ({"dtype": args.dtype} if args.dtype else {})


def matters(engine: str, method: str) -> bool:
    """Whether this is one of the four main runs: the full cache and SnapKV, in vlkv and in sdpa."""
    return engine in ("vlkv", "sdpa") and method in ("none", "snapkv")


class Contestant(NamedTuple):
    """A method in one engine."""

    engine: str
    method: str
    run: Callable[[], torch_side.Run]
    compile_seconds: float | None = None  # None: the first call is measured


def _contestants(folder: Path, cell: dict[str, Any], params: Any, dtype: str) -> list[Contestant]:
    """Method by method, vlkv first. Long prompts have only the runs that matter, unless the cell has `all`."""
    short = cell["all"] or cell["prompt"] <= _LONGEST
    attentions = {
        method: [name for name in torch_side.METHODS[method]["attention"] if short or matters(name, method)]
        for method in cell["methods"]
        if short or matters("vlkv", method)
    }
    torch_side.free()  # the models of the last cell
    peers = {name: torch_side.Peer(folder, name, dtype=dtype) for name in sorted(set().union(*attentions.values()))}
    shape = cell.get("batch", 1), cell["prompt"]
    tokens = np.random.default_rng(0).integers(3, params.config.decoder.vocab_size, shape)
    exact = vlkv.Buckets(text=(1, cell["prompt"]))  # without rounding up, because torch does not round up either
    inputs = jax.device_put(vlkv.Inputs.from_hf({"input_ids": tokens}, params.config, exact))
    contestants = []
    for method, names in attentions.items():
        keep = {} if method == "none" else {"keep": cell["keep"]}
        policy = policies.make(torch_side.METHODS[method]["policy"], **keep)
        pair = compile_pair(params, inputs, policy, new=cell["new"])
        run = partial(_ours_once, pair, params, inputs, cell["new"])
        contestants.append(Contestant("vlkv", method, run, round(pair.first_call_seconds, 2)))
        for name in names:
            run = partial(peers[name].run, tokens, method, cell["keep"], cell["new"])
            contestants.append(Contestant(name, method, run))
    return contestants


def _ours_once(pair: Pair, params: Any, inputs: Any, new: int) -> torch_side.Run:
    prefill, decode, kept, logits = run_pair(pair, params, inputs)
    return torch_side.Run(prefill, decode / (new - 1), kept, logits)


def measure(folder: Path, cell: dict[str, Any], rounds: int) -> dict[str, Any]:
    dtype = cell.get("dtype", "float32" if jax.default_backend() == "cpu" else "bfloat16")
    params = vlkv.load_params(folder, dtype=dtype)
    contestants = _contestants(folder, cell, params, dtype)
    rows: list[dict[str, Any]] = [{"engine": each.engine, "method": each.method} for each in contestants]
    turns = [
        [i for i, row in enumerate(rows) if cell["all"] or number == 0 or matters(row["engine"], row["method"])]
        for number in range(rounds)
    ]
    firsts: dict[tuple[str, str], np.ndarray] = {}
    taken: list[list[torch_side.Run]] = [[] for _ in contestants]
    copies: list[tuple[float, float]] = []
    reads: list[float] = []
    with progress_bar(f"{cell['model']}, {cell['prompt']}", len(rows) + sum(map(len, turns))) as advance:
        for row, each in zip(rows, contestants, strict=True):
            begin = time.perf_counter()
            run, row["peak_bytes"] = _peak(each.run)
            seconds = round(time.perf_counter() - begin, 2)
            row["first_call_seconds"] = seconds if each.compile_seconds is None else each.compile_seconds
            firsts[each.engine, each.method], row["kept"] = run.first, run.kept
            advance()
        for number, order in enumerate(turns):
            time.sleep(_PAUSE)
            copies.append(_copy())
            reads.append(torch_side.read_speed(_COPY["gpu" if torch_side.on_gpu() else "cpu"]))
            time.sleep(_PAUSE)
            for i in order[number % len(order) :] + order[: number % len(order)]:
                time.sleep(_PAUSE)
                taken[i].append(contestants[i].run())
                advance()
    bandwidth, reading = float(np.median([max(pair) for pair in copies])), float(np.median(reads))
    for row, runs in zip(rows, taken, strict=True):
        for name in ("prefill", "step"):
            row[f"{name}_times"] = [getattr(run, f"{name}_seconds") for run in runs]
            row[f"{name}_seconds"] = float(np.median(row[f"{name}_times"]))
        row["tokens_per_second"] = 1 / row["step_seconds"]
        moved = step_bytes(params, cell.get("batch", 1), row["kept"] + cell["new"] / 2)
        step = row["step_seconds"] / moved
        row |= {"step_bytes": int(moved), "step_to_bytes_time": step * bandwidth, "step_to_read_time": step * reading}
    without = [firsts[engine, "none"] for engine in ("vlkv", "sdpa") if "none" in cell["methods"]]
    return {
        "dtype": dtype,
        "copy_bytes_per_second": bandwidth,
        "copy_by": [list(pair) for pair in copies],
        "read_bytes_per_second": reading,
        "first_logits_differ_by": float(np.abs(np.subtract(*without)).max()) if without else None,
        "rows": rows,
    }


_turn = jax.jit(jnp.negative, donate_argnums=0)


def _copy() -> tuple[float, float]:
    """Bytes per second (read plus written) of copying a large buffer on one thread, and on all cores.

    On a GPU both are the rate of changing an array in place.
    """
    gpu, cores = jax.default_backend() == "gpu", os.cpu_count() or 1
    size = _COPY["gpu" if gpu else "cpu"]
    source: Any = jnp.ones(size // 4, jnp.float32) if gpu else np.ones(size // 4, np.float32)
    target: Any = None if gpu else np.zeros_like(source)
    best = [0.0, 0.0]
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for turn in range(8):  # the first two start the threads
            parts = (1, cores)[turn % 2]
            begin = time.perf_counter()
            if gpu:
                source = jax.block_until_ready(_turn(source))
            else:
                list(pool.map(np.copyto, *(np.array_split(each, parts) for each in (target, source))))
            if turn > 1:
                best[turn % 2] = max(best[turn % 2], 2 * size / (time.perf_counter() - begin))
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
    for measured in result["cells"]:
        cell, rows = measured["cell"], measured["rows"]
        where = {(row["engine"], row["method"]): row for row in rows}
        copy = measured["copy_bytes_per_second"] / 1e9
        read = measured.get("read_bytes_per_second", np.nan) / 1e9  # older files do not have it
        table = Table(
            "method", "engine", "kept", "prefill s", "ms/step", "token/s", "peak MiB", "first call s",
            "relative to bytes", "vlkv: prefill", "vlkv: decode", "at most",
            title=f"{cell['model']}, {cell['prompt']} tokens, batch {cell.get('batch', 1)}, keep {cell['keep']:.0%} "
            f"of all tokens, {measured['dtype']}, copy {copy:.1f}, read {read:.1f} GB/s",
        )  # fmt: skip
        for row in rows:
            mine, ratios = where["vlkv", row["method"]], ["", "", ""]
            to_read = row.get("step_to_read_time", np.nan)
            if row is not mine:
                ratios = [f"{_ratio(row, mine, name):.2f}x" for name in ("prefill_times", "step_times")]
                ratios.append(f"{to_read:.2f}x")
            table.add_row(
                row["method"],
                row["engine"],
                f"{row['kept']:.0f}",
                f"{row['prefill_seconds']:.3f}",
                f"{1e3 * row['step_seconds']:.2f}",
                f"{row['tokens_per_second']:.1f}",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
                f"{row['first_call_seconds']:.1f}",
                f"{row['step_to_bytes_time']:.2f}, {to_read:.2f}",
                *ratios,
            )
        console.print(table)


def _ratio(theirs: dict[str, Any], mine: dict[str, Any], times: str) -> float:
    return float(np.median([a / b for a, b in zip(theirs[times], mine[times], strict=False)]))


if __name__ == "__main__":
    raise SystemExit(main())
