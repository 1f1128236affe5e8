"""Measure the share of tokens that each layer keeps with PrefixKV on a few samples, and save it as a profile.

  vlkv profile --model mini --images page.png --prompts "read the page" \\
      --keep 0.5 --out profile.json
  vlkv generate --model mini --image page.png --prompt "read the page" \\
      --policy "prefixkv(profile='profile.json')" --keep 0.5
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vlkv import loading
from vlkv.analysis import profiles
from vlkv.errors import InputError
from vlkv.generation.decode import check_room
from vlkv.policies import PrefixKV
from vlkv.terminal import track
from vlkv.tools.commands.options import add_model_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv profile`."""
    add_model_arguments(parser)
    parser.add_argument("--images", nargs="+", default=[], metavar="FILE", help="one per sample; none: only text")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="TEXT", help="one per sample, or one for all")
    parser.add_argument("--keep", type=float, required=True, metavar="FRACTION", help="share of the tokens, in (0, 1]")
    parser.add_argument("--scope", choices=["vision", "all"], default="all", help="what competes for the budget")
    parser.add_argument("--out", type=Path, required=True, metavar="JSON", help="file of the profile")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """A table of shares and their deviation, or the content of the file."""
    policy = PrefixKV(keep=args.keep, scope=args.scope)  # arguments are checked before weights are read
    if args.scope == "vision" and not args.images:
        raise InputError("--scope vision needs --images: without them there is nothing to measure")
    if args.out.is_dir():
        raise InputError(f"{args.out}: is a folder; give the name of a file")
    if not args.out.parent.is_dir():
        raise InputError(f"{args.out.parent}: no such folder to write the profile into")
    processor = loading.load_processor(args.model)
    samples = [processor(image, prompt) for image, prompt in pairs(args.images, args.prompts)]
    for inputs in samples:
        check_room(processor.config, inputs, 1)
    params = loading.load_params(args.model, dtype=args.dtype)
    ratios = profiles.measure(params, track(samples, "measuring"), policy)
    content = profiles.save(args.out, ratios, policy, params.config, name=Path(args.model).name)
    if args.json:
        return content
    table = Table("layer", "share", "spread", title=f"{len(samples)} samples, keep = {args.keep:.0%}: {args.out}")
    for layer, (share, spread) in enumerate(zip(content["shares"], content["spread"], strict=True)):
        table.add_row(str(layer), f"{share:.4f}", f"{spread:.4f}")
    Console().print(table)
    return None


def pairs(images: list[str], prompts: list[str]) -> list[tuple[str | None, str]]:
    """Pairs of image and prompt: one prompt per image, or the same prompt for all images."""
    if images and len(prompts) not in (1, len(images)):
        raise InputError(f"{len(prompts)} prompts for {len(images)} images: give one for all, or one per image")
    if not images:
        return [(None, prompt) for prompt in prompts]
    return list(zip(images, prompts * (len(images) // len(prompts)), strict=True))
