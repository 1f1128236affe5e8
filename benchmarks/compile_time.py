"""Time to compile the programs of `vlkv eval` for text, one after another: one reads prompts, two belong to a method.

    python -m benchmarks.compile_time [--model DIR] [--policy full "snapkv(keep=0.1)" ...] [--out JSON]

Only the config of the model is needed, no weights. Processor time counts all threads of the compiler. No compile cache
is used.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from vlkv import Inputs, policies
from vlkv.files import write_json
from vlkv.generation import jitted
from vlkv.generation.sampling import Greedy
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.benching import machine
from vlkv.tools.benching.subjects import find

METHODS = "full", "snapkv(keep=0.1)", "h2o(keep=0.1)", "adakv(keep=0.1)"


def main() -> int:
    """Compiles, prints the table, writes the JSON."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder with config.json, or a preset (default: tiny)")
    parser.add_argument("--policy", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--rows", type=int, default=4, metavar="B", help="(default: 4)")
    parser.add_argument("--prompt", type=int, default=1152, metavar="T", help="tokens of a row (default: 1152)")
    parser.add_argument("--new", type=int, default=64, metavar="S", help="tokens of an answer (default: 64)")
    parser.add_argument("--out", type=Path)
    return guarded(lambda: run(parser.parse_args()))


def run(args: argparse.Namespace) -> None:
    """Compiles all programs."""
    jax.config.update("jax_enable_compilation_cache", False)
    subject = find(args.model)
    chosen = {text: policies.make(text) for text in args.policy}
    ids = np.ones((args.rows, args.prompt), np.int32)
    inputs = Inputs.from_hf({"input_ids": ids, "attention_mask": ids}, subject.config)
    rows: list[dict[str, Any]] = []

    def compiled(name: str, function: Any, *arguments: Any, **options: Any) -> Any:
        """Adds the times of a program; returns the shapes of its results."""
        begin = time.perf_counter()
        traced = function.trace(*arguments, **options)
        lowered = traced.lower()
        middle, processor = time.perf_counter(), time.process_time()
        lowered.compile()
        used, end = time.process_time() - processor, time.perf_counter()
        times = {"trace_seconds": middle - begin, "compile_seconds": end - middle, "processor_seconds": used}
        rows.append({"program": name} | {key: round(value, 2) for key, value in times.items()})
        return traced.out_info

    read, observers = partial(compiled, "read the prompt", jitted.read_prompt), tuple(chosen.values())
    prompt = read(subject.shapes, inputs, observers=observers, new_tokens=args.new)
    key, sampling = jax.random.key(0), Greedy(max_new_tokens=args.new)
    for text, policy in chosen.items():
        fill = jitted.fill_cache_with
        cache = compiled(f"fill, {text}", fill, prompt, policy, None, new_tokens=args.new, key=key)
        compiled(f"decode, {text}", jitted.decode, subject.shapes, cache, prompt.logits, sampling=sampling)
    table = Table("program", "trace, s", "compile, s", "processor time, s")
    for row in rows:
        table.add_row(*map(str, row.values()))
    table.add_row("all", *(f"{sum(row[name] for row in rows):.1f}" for name in list(rows[0])[1:]))
    Console().print(table)
    if args.out:
        names = "rows", "prompt", "new"
        settings = {"model": subject.name, "dtype": subject.dtype.name} | {name: getattr(args, name) for name in names}
        write_json(args.out, {"machine": machine.describe(), **settings, "programs": rows})


if __name__ == "__main__":
    raise SystemExit(main())
