"""Compile prefill and a decode step for absent TPUs: bytes per chip, collectives, times. For GPUs: from shapes alone.

  vlkv plan llava-1.5-7b --topology v5e:2x2 --prompt 1024 \\
      --policy aircache --keep 0.1
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from checkpoints_convert import packaged
from vlkv import loading
from vlkv.families import presets
from vlkv.tools import planning
from vlkv.tools.commands.options import add_policy_arguments, policy_from
from vlkv.tools.planning.planning import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv plan`."""
    parser.add_argument(
        "model", metavar="MODEL", help="a published size (one of vlkv.presets), a checkpoint folder, a hub id, or mini"
    )
    chips = f"chips and how many, as in v5e:4x4, v4:2x2x1, a100:1; chips: {', '.join(planning.CHIPS)}"
    parser.add_argument("--topology", required=True, metavar="CHIP:SHAPE", help=chips)
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="prompts, over all chips (default: 1)")
    parser.add_argument(
        "--prompt", type=int, required=True, metavar="TOKENS", help="tokens of each prompt, including vision tokens"
    )
    parser.add_argument("--new", type=int, default=64, metavar="TOKENS", help="generated tokens (default: 64)")
    parser.add_argument(
        "--images", type=int, metavar="N", help="images, or tiles, of a prompt (default: as many as fit)"
    )
    add_policy_arguments(parser)
    parser.add_argument("--mesh", metavar="data=D,model=M", help="chips per axis (default: so that the job fits)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and cache (default: bfloat16)")
    parser.add_argument(
        "--thorough", action="store_true", help="compile with all optimisations: takes twice as long (TPU)"
    )
    parser.add_argument(
        "--generate", action="store_true", help="compile `generate` too, to see the compile time of a first call (TPU)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """Prints a table on stdout, or returns the content for JSON; progress is on stderr."""
    if not os.environ.get("JAX_PLATFORMS"):  # nothing runs, so no accelerator of this machine is needed
        jax.config.update("jax_platforms", "cpu")
    folder = args.model in ("mini", *packaged.CHECKPOINTS) or "/" in args.model or Path(args.model).exists()
    named = args.model in presets or not folder
    config = presets[args.model] if named else loading.load_processor(args.model).config
    policy = policy_from(args, lambda: config)
    model = args.model if named else config
    same = {name: getattr(args, name) for name in ("topology", "batch", "prompt", "mesh", "dtype", "images")}
    settings = {**same, "new_tokens": args.new, "whole": args.generate, "quick": not args.thorough}
    with _progress() as say:
        plan = planning.plan(model, policy=policy, report=say, **settings)
    if args.json:
        return planning.as_json(plan)
    Console().print(planning.as_table(plan), highlight=False)
    return None


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Prints on stderr which program is being compiled, or computed from shapes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(text, highlight=False)
        return
    with console.status("planning") as status:
        yield status.update
