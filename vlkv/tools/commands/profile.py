"""Measure the share of tokens that each layer keeps with PrefixKV on a few samples, and save it as a profile.

With --what drift, measure where answers attend next instead, and save it as a kernel for `Smooth`, with a picture.

  vlkv profile --model mini --images page.png --prompts "read the page" \\
      --keep 0.5 --out profile.json
  vlkv generate --model mini --image page.png --prompt "read the page" \\
      --policy "prefixkv(profile='profile.json')" --keep 0.5
  vlkv profile questions.jsonl --samples 10 --model DIR \\
      --keep 0.1 0.2 0.5 --out profile.json
  vlkv profile questions.jsonl --model DIR --what drift \\
      --scope vision --out drift.json
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vlkv import loading
from vlkv.analysis import profiles
from vlkv.errors import InputError
from vlkv.generation.decode import check_room
from vlkv.policies import PrefixKV
from vlkv.terminal import track
from vlkv.tools.commands import drift
from vlkv.tools.commands.options import add_model_arguments, require_least
from vlkv.tools.commands.plots import check_file
from vlkv.tools.commands.samples import inputs_of, read_samples, sample
from vlkv.tools.evaluation.records import Record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv profile`."""
    add = parser.add_argument
    add("data", nargs="?", type=Path, metavar="DATA.jsonl", help="samples, one per line, as for eval")
    add_model_arguments(parser)
    add("--images", nargs="+", default=[], metavar="FILE", help="one per sample; none: only text")
    add("--prompts", nargs="+", default=[], metavar="TEXT", help="one per sample, or one for all")
    add("--samples", type=int, metavar="N", help="N random samples of DATA (default: all)")
    add("--seed", type=int, default=0, help="of the choice of samples")
    add("--what", choices=["shares", "drift"], default="shares", help="of PrefixKV's layers, or of the attention")
    shares = "shares of the tokens, in (0, 1]; the file has a profile for each"
    add("--keep", type=float, nargs="+", metavar="FRACTION", help=shares)
    add("--scope", choices=["vision", "all"], default="all", help="what competes for the budget")
    search = "search by bisection until the sum of the shares is at most D from the budget (PrefixKV, Table 10)"
    add("--tolerance", type=float, metavar="D", help=search)
    add("--steps", type=int, metavar="N", help="limit on the bisections (PrefixKV, Table 11)")
    add("--compare", type=Path, metavar="JSON", help="also print how far the samples are from this profile")
    drift.add_arguments(parser)
    add("--out", type=Path, required=True, metavar="JSON", help="file of the profile")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """Tables of shares and their deviations, or the content of the file."""
    if args.what == "drift":
        drift.checked(args)
    elif args.keep is None:
        raise InputError("give --keep, the shares of the tokens")
    keeps = list(dict.fromkeys(args.keep or ()))
    plan = [PrefixKV(keep=keep, scope=args.scope) for keep in keeps]  # arguments are checked before weights are read
    if args.scope == "vision" and args.data is None and not args.images:
        raise InputError("--scope vision needs --images: without them there is nothing to measure")
    check_file(args.out, "profile")
    require_least(args, samples=1, steps=1, tolerance=0)
    processor = loading.load_processor(args.model)
    references = [
        None if args.compare is None else profiles.load(args.compare, processor.config, keep=keep, scope=args.scope)
        for keep in keeps
    ]
    inputs = [inputs_of(processor, record) for record in chosen(args)]
    for sample_inputs in inputs:
        check_room(processor.config, sample_inputs, 1)
    if args.what == "drift":
        return drift.run(args, inputs)
    params = loading.load_params(args.model, dtype=args.dtype)
    ratios, steps = [], []
    for policy in plan:
        samples = track(inputs, f"measuring keep {policy.keep}")
        if args.tolerance is None and args.steps is None:
            ratios.append(profiles.measure(params, samples, policy))
            continue
        tolerance, limit = args.tolerance or 0.0, args.steps or 64
        shares, taken = profiles.searched(params, samples, policy, tolerance=tolerance, steps=limit)
        ratios.append(shares)
        steps.append(float(taken.mean()))
    content = profiles.save(args.out, dict(zip(plan, ratios, strict=True)), params.config, name=Path(args.model).name)
    deviations = {"std": [float(profiles.spread(each).mean()) for each in ratios]}
    if args.compare is not None:
        distances = [profiles.distance(x, np.array(y)).mean() for x, y in zip(ratios, references, strict=True)]
        deviations["mad"] = list(map(float, distances))
    if steps:
        deviations["steps"] = steps
    if args.json:
        return {**content, **deviations}
    Console().print(shares_table(keeps, ratios, title=f"{len(ratios[0])} samples: {args.out}"))
    Console().print(deviations_table(keeps, deviations))
    return None


def chosen(args: argparse.Namespace) -> list[Record]:
    """The samples that the arguments describe."""
    if args.data is None:
        if not args.prompts:
            raise InputError("give DATA.jsonl, or --prompts with or without --images")
        if args.samples is not None:
            raise InputError(f"--samples {args.samples} chooses rows of DATA.jsonl, which is missing")
        return pairs(args.images, args.prompts)
    if args.images or args.prompts:
        raise InputError("give DATA.jsonl, or --images and --prompts, not both")
    return read_samples(args.data, number=args.samples, seed=args.seed)


def pairs(images: list[str], prompts: list[str]) -> list[Record]:
    """Samples of image and prompt: one prompt per image, or the same prompt for all images."""
    if not images:
        return [sample([], prompt) for prompt in prompts]
    if len(prompts) not in (1, len(images)):
        raise InputError(f"{len(prompts)} prompts for {len(images)} images: give one for all, or one per image")
    one_each = prompts * (len(images) // len(prompts))
    return [sample([image], prompt) for image, prompt in zip(images, one_each, strict=True)]


def shares_table(keeps: Sequence[float], ratios: Sequence[np.ndarray], *, title: str) -> Table:
    """The mean share of each layer, and its standard deviation, at each keep."""
    table = Table("layer", *(f"{keep:.3g}" for keep in keeps), title=title)
    columns = [(profiles.aggregate(each), profiles.spread(each)) for each in ratios]
    for layer in range(len(columns[0][0])):
        table.add_row(str(layer), *(f"{share[layer]:.4f} ± {spread[layer]:.4f}" for share, spread in columns))
    return table


def deviations_table(keeps: Sequence[float], deviations: dict[str, list[float]]) -> Table:
    """Deviations between the samples and average steps of the search, at each keep."""
    table = Table("", *(f"{keep:.0%}" for keep in keeps), title="means over the layers")
    for name, values in deviations.items():
        table.add_row(name, *(f"{value:.3f}" if name != "steps" else f"{value:.1f}" for value in values))
    return table
