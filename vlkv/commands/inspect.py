"""Measure what the papers draw, of any model, image and policy: budgets, attention, survival, cost and more.

vlkv inspect --what budgets
vlkv inspect --what survival --policy lightkv --out survival.png
vlkv inspect --what attention --model DIR --image cat.png \\
    --prompt "What is this?"
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from vlkv import loading
from vlkv.commands.options import add_model_arguments, add_policy_arguments, policy_from
from vlkv.commands.plots import check_plots, save
from vlkv.commands.views import WHAT, Case
from vlkv.errors import InputError
from vlkv.generate import check_room
from vlkv.inputs import Inputs
from vlkv.mini import CHECKPOINT, pages
from vlkv.policies import Policy
from vlkv.processing import Processor

_ROWS = 32  # of the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv inspect`."""
    parser.add_argument("--what", required=True, metavar="NAME", help=f"one of {', '.join(WHAT)}")
    add_model_arguments(
        parser, required=False, help="a checkpoint folder, or a hub id (default: the demo model on a held-out page)"
    )
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="may be repeated")
    parser.add_argument("--prompt", metavar="TEXT", help="needed with --model")
    add_policy_arguments(parser)
    parser.set_defaults(policy=None)  # each figure has a policy of its own
    parser.add_argument("--max-new-tokens", type=int, default=20, metavar="N", help="of decoding that is watched")
    parser.add_argument("--ranks", type=int, default=32, metavar="N", help="points of the ranking curve")
    parser.add_argument("--seed", type=int, default=0, help="of random policies, and of the miniature's page")
    parser.add_argument("--out", type=Path, metavar="PNG", help="where the picture goes (default: inspect-NAME.png)")
    parser.add_argument("--json", action="store_true", help="print JSON, and draw only if --out is given")


def run(args: argparse.Namespace) -> Any:
    """A table on stdout and a picture, or the arrays as JSON."""
    if args.what not in WHAT:
        raise InputError(f"--what {args.what}: there are {', '.join(WHAT)}")
    measure, policy = WHAT[args.what], _policy(args)
    for name, least in (("max_new_tokens", 2), ("ranks", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}")
    out = args.out or (None if args.json else Path(f"inspect-{args.what}.png"))
    if out is not None:
        check_plots(out)
    folder, processor, inputs = _question(args)
    check_room(processor.config, inputs, args.max_new_tokens)
    params = loading.load_params(folder, dtype=args.dtype)
    case = Case(params, inputs, policy, jax.random.key(args.seed), args.max_new_tokens, args.ranks)
    view = measure.view(case)
    if out is not None:
        save(view.panels, out)
    if args.json:
        said = {"what": args.what, "policy": type(policy).__name__, "options": policy.options()}
        return _plain({**said, "prompt_tokens": inputs.valid.sum(), "picture": out and str(out), **view.arrays})
    _show(f"{args.what} of {type(policy).__name__}, scope {policy.scope} ({measure.source})", view.columns)
    Console().print(str(out), highlight=False)
    return None


def _policy(args: argparse.Namespace) -> Policy:
    """The one asked for, or the one that the figure shows."""
    if args.policy is None:
        measure = WHAT[args.what]
        args.policy = measure.policy
        if args.keep is None and args.budget is None:
            args.keep = measure.keep
    return policy_from(args, lambda: loading.load_processor(args.model or CHECKPOINT).config)


def _question(args: argparse.Namespace) -> tuple[Path, Processor, Inputs]:
    """The folder, its processor, and what is asked."""
    if args.model is None:
        if args.image:
            raise InputError("--image needs --model: without both, the miniature reads a held-out page")
        page, entry = pages.held_out_page(np.random.default_rng(args.seed))
        processor = loading.load_processor(CHECKPOINT)
        return CHECKPOINT, processor, processor(page.image, args.prompt or entry.question)
    if args.prompt is None:
        raise InputError("--model needs --prompt: what is asked about the image")
    processor = loading.load_processor(args.model)
    return args.model, processor, processor(args.image or None, args.prompt)


def _plain(x: Any) -> Any:
    """Arrays as lists and whatever is no finite number as null, for JSON."""
    if isinstance(x, dict):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    if isinstance(x, (np.ndarray, np.generic, jax.Array)):
        return _plain(np.asarray(x).tolist())
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _show(title: str, columns: dict[str, np.ndarray]) -> None:
    """A table of at most `_ROWS` rows."""
    table = Table(*columns)
    length = len(next(iter(columns.values())))
    for i in np.unique(np.linspace(0, length - 1, min(length, _ROWS)).astype(int)):
        table.add_row(*(f"{x[i]:.3f}" if np.asarray(x).dtype.kind == "f" else str(x[i]) for x in columns.values()))
    console = Console()
    console.print(title, highlight=False)
    console.print(table)
