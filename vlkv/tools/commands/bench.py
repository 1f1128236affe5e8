"""Measure prefill and decoding for policies, keeps, batch sizes and prompt lengths.

  vlkv bench --model mini --policy snapkv h2o --keep 0.2 0.1 --prompt 512
  vlkv bench --model llava-1.5-7b --policy aircache --keep 0.1 --dry-run
  vlkv bench --model qwen2-vl-7b --mesh data=4,model=4 --pod --prompt 8192

The programs of one setting are compiled first and then measured alternately, so that ratios to the full cache are from
the same run; with `--together` all settings are, so that the noise of a shared machine cancels out between batches too.
`--programs` measures the compiler instead. `--out` is written after every setting; results that it already contains are
not measured again. On a pod start the same command on every host; the first process prints and writes.
"""

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from vlkv.errors import InputError
from vlkv.files import read_json, write_json
from vlkv.policies import Policy
from vlkv.sharding.placement import make_mesh
from vlkv.tools.benching import machine, programs, tables
from vlkv.tools.benching.measuring import measure_missing
from vlkv.tools.benching.results import Results, identity
from vlkv.tools.benching.settings import Setting, Subject, check_policy, find, grid, make_inputs, with_full
from vlkv.tools.commands.options import add_policy_arguments, policies_from
from vlkv.tools.planning.chips import parse_mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv bench`."""
    model = "a published size with random weights, a checkpoint folder, a hub id, or mini"
    parser.add_argument("--model", default="mini", metavar="NAME", help=model)
    add_policy_arguments(parser, default="snapkv", many=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B", help="rows")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1024], metavar="T", help="tokens of a row")
    parser.add_argument("--new", type=int, default=64, metavar="S", help="generated tokens")
    parser.add_argument("--text", type=int, default=64, metavar="T", help="text tokens; the rest is vision")
    parser.add_argument(
        "--together", action="store_true", help="alternate all batches and prompts, and compare with the first"
    )
    parser.add_argument(
        "--programs", action="store_true", help="only compile the programs of vlkv eval, one by one; print the times"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measurements of each")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: float32 on a CPU)"
    )
    parser.add_argument("--mesh", metavar="data=D,model=M", help="devices per axis (default: one device)")
    parser.add_argument("--pod", action="store_true", help="use the devices of all hosts, which JAX finds itself")
    parser.add_argument("--out", type=Path, metavar="JSON", help="file of results, from which a run resumes")
    parser.add_argument("--dry-run", action="store_true", help="only print the plan and the bytes it needs")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """Prints a table, or returns the same content for JSON."""
    if args.rounds < 1:
        raise InputError(f"--rounds {args.rounds} must be at least 1")
    if args.pod:
        if args.mesh is None:
            raise InputError("--pod: give --mesh too, the devices of all hosts per axis")
        jax.distributed.initialize()
    first = jax.process_index() == 0
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 160, quiet=not first)
    command = "vlkv bench " + " ".join(sys.argv[2:])
    work = _plan(args)
    if args.programs:
        if len(work) > 1:
            raise InputError("--programs: give one --batch and one --prompt")
        return _programs(args, *work[0], console)
    lines = [(subject, setting, policy) for subject, setting, contestants in work for policy in contestants]
    cells = [identity(line, together=args.together) for line in lines]
    results = Results(args.out if first else None, command)
    if args.dry_run:
        done = [results.find(cell) is not None for cell in cells]
        tables.plan(console, lines, done)
        planned = [{**cell, "measured": is_done} for cell, is_done in zip(cells, done, strict=True)]
        return planned if args.json else None
    if jax.process_count() > 1 and results.rows:
        raise InputError(f"--out {args.out}: with several hosts give a new file")  # the others do not know its rows
    mesh = work[0][0].mesh
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        measure_missing(work, results, rounds=args.rounds, together=args.together)
    tables.measured(console, [(line, results.find(cell) or {}) for line, cell in zip(lines, cells, strict=True)])
    return results.content if args.json and first else None


def _programs(
    args: argparse.Namespace, subject: Subject, setting: Setting, contestants: list[Policy], console: Console
) -> Any:
    """Compiles the programs of an evaluation; prints their times, and writes or returns them."""
    if args.out is not None and "programs" not in (read_json(args.out) or {"programs": []}):
        raise InputError(f"{args.out}: contains other results; give another --out")
    inputs = make_inputs(subject.config, setting.batch, setting.prompt, setting.vision)
    rows = programs.evaluation(subject.shapes, inputs, contestants, new=setting.new)
    tables.compiled(console, rows)
    settings = {"rows": setting.batch, "prompt": setting.prompt, "new": setting.new}
    about = {"machine": machine.describe(), "model": subject.name, "dtype": subject.dtype.name}
    content = {**about, **settings, "programs": rows}
    if args.out is not None:
        write_json(args.out, content)
    return content if args.json else None


def _plan(args: argparse.Namespace) -> list[tuple[Subject, Setting, list[Policy]]]:
    subject = find(args.model, dtype=args.dtype)
    if args.mesh is not None:
        data, model = parse_mesh(args.mesh, jax.device_count())
        subject = dataclasses.replace(subject, mesh=make_mesh(data=data, model=model))
    contestants = with_full(policies_from(args, lambda: subject.config, keep=0.1))
    for policy in contestants:
        check_policy(policy, subject.config)
    settings = grid(subject.config, batches=args.batch, prompts=args.prompt, text=args.text, new=args.new)
    return [(subject, setting, contestants) for setting in settings]
