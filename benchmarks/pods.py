"""Times prefill and decoding on a pod: every host runs this command, process 0 writes the JSON.

    python -m benchmarks.pods --model qwen2-vl-7b --pod --data 4 --model-axis 4 --batch 16 --prompt 8192 --out pod.json

On a TPU pod JAX finds the other hosts itself; elsewhere give --coordinator HOST:PORT --processes N --process I, with a
different I on each host. Weights are random and created on their devices, inputs are divided over `data`, and every
process runs the same programs: the full cache and the policies alternately, as `vlkv bench` does. A dry run is one
process with 8 virtual devices:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.pods --model tiny --data 2 --model-axis 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from vlkv import policies
from vlkv.errors import InputError
from vlkv.families import init
from vlkv.sharding.placement import make_mesh, place_inputs
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.benching import results, tables
from vlkv.tools.benching.measuring import measure
from vlkv.tools.benching.settings import Setting, check_policy, with_full
from vlkv.tools.benching.subjects import find


def main(argv: Sequence[str] | None = None) -> int:
    """One process of the pod."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2-vl-7b", metavar="NAME", help="a published size")
    parser.add_argument("--data", type=int, default=1, help="devices that share the rows")
    parser.add_argument("--model-axis", type=int, default=1, metavar="M", help="devices that share heads and channels")
    parser.add_argument("--policy", nargs="+", default=["aircache"], metavar="NAME")
    parser.add_argument("--keep", nargs="+", type=float, default=[0.1])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--text", type=int, default=64)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--coordinator", metavar="HOST:PORT")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int, metavar="I")
    parser.add_argument("--pod", action="store_true", help="several hosts that JAX finds itself (a TPU pod)")
    parser.add_argument("--out", type=Path, help="file of results, written by process 0, from which a run resumes")
    return guarded(lambda: run(parser.parse_args(argv)))


def run(args: argparse.Namespace) -> None:
    """Joins the pod and measures; process 0 prints and writes the results."""
    given = [args.coordinator, args.processes, args.process]
    if any(x is not None for x in given) and None in given:
        raise InputError("--coordinator, --processes and --process: give all three, or none")
    if args.coordinator is not None:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    elif args.pod:
        jax.distributed.initialize()
    subject = find(args.model, dtype=args.dtype)
    if subject.folder is not None:
        raise InputError(f"--model {args.model}: pods are timed with random weights of a published size")
    made = [policies.make(name, keep=keep) for name in args.policy for keep in args.keep]
    contestants = with_full(made)
    for policy in contestants:
        check_policy(policy, subject.config)
    setting = Setting(args.batch, args.prompt, args.text, args.new)
    mesh = make_mesh(data=args.data, model=args.model_axis)
    first = jax.process_index() == 0
    held = results.Results(args.out if first else None, "python -m benchmarks.pods")
    place = {"mesh": {"data": args.data, "model": args.model_axis}, "processes": jax.process_count()}

    def cell(policy: policies.Policy) -> dict[str, Any]:
        return {**results.identity((subject, setting, policy)), **place}

    done = [held.find(cell(policy)) is not None for policy in contestants]
    if not _agreed(all(done)):
        params = init(subject.config, jax.random.key(0), mesh, dtype=subject.dtype)
        with jax.set_mesh(mesh):
            rows = measure(params, setting, contestants, rounds=args.rounds, place=lambda x: place_inputs(x, mesh))
        for policy, row, measured in zip(contestants, rows, done, strict=True):
            if not measured:
                held.add(cell(policy), row)
    if first:
        console = Console(width=140)
        console.print(f"{jax.device_count()} devices, {jax.process_count()} processes, mesh {place['mesh']}")
        lines = [((subject, setting, policy), held.find(cell(policy)) or {}) for policy in contestants]
        tables.measured(console, lines)


def _agreed(done: bool) -> bool:
    """Process 0's value in every process, because only process 0 reads the file."""
    if jax.process_count() == 1:
        return done
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(done))


if __name__ == "__main__":
    raise SystemExit(main())
