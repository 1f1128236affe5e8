"""Repeat the measurements of the papers' figures on any model, data and policy: budgets, attention, cost and more.

vlkv inspect --what budgets --model mini --samples 100
vlkv inspect questions.jsonl --what lorenz --model DIR
vlkv inspect --what survival --policy lightkv --out survival.png
vlkv inspect --what attention --model DIR --image cat.png \\
    --prompt "What is this?"
vlkv inspect --what text --model DIR --prompt "A long text. A question?" \\
    --policy snapkv --keep 0.2 --html text.html
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from vlkv import loading
from vlkv.errors import InputError
from vlkv.files import plain
from vlkv.generation.decode import check_room
from vlkv.mini import CHECKPOINT, pages
from vlkv.policies import Policy, text_of
from vlkv.processing.images import open_image
from vlkv.terminal import track
from vlkv.tools.commands import measures
from vlkv.tools.commands.case import Case, View, mean_view
from vlkv.tools.commands.options import add_model_arguments, add_policy_arguments, policy_from, require_least
from vlkv.tools.commands.plots import check_file, require_matplotlib, save
from vlkv.tools.commands.samples import inputs_of, read_samples, sample
from vlkv.tools.evaluation.records import Record

_ROWS = 32  # most rows of the printed table


class Measurement(NamedTuple):
    """A measurement, the figures that it repeats (or ""), and the policy and keep that they use."""

    view: Callable[[Case], View]
    source: str
    policy: str
    keep: float | None


WHAT = {
    "budgets": Measurement(measures.budgets, "PrefixKV, Fig. 4", "PrefixKV", 0.5),
    "lorenz": Measurement(measures.lorenz, "PrefixKV, Figs. 2, 4", "PrefixKV", 0.5),
    "strength": Measurement(measures.strength, "AirCache, Fig. 3", "AirCache", 0.1),
    "divergence": Measurement(measures.divergence, "AirCache, Table 13; CSP, Figs. 1, 7", "AirCache", 0.1),
    "error": Measurement(measures.error, "PrefixKV, Fig. 5", "PrefixKV", 0.5),
    "attention": Measurement(measures.attention, "A-VL, Fig. 1", "Full", None),
    "concordance": Measurement(measures.concordance, "A-VL, Figs. 4, 5", "Full", None),
    "observers": Measurement(measures.observers, "AirCache, Fig. 1", "AirCache", 0.1),
    "patches": Measurement(measures.patches, "A-VL, Fig. 3", "Full", None),
    "densities": Measurement(measures.densities, "CSP, Fig. 6", "CSP", 0.2),
    "merged": Measurement(measures.merged, "LightKV, Fig. 7", "LightKV", None),
    "survival": Measurement(measures.survival, "LightKV, Fig. 7", "FastV", 0.5),
    "text": Measurement(measures.text, "", "SnapKV", 0.2),
    "cost": Measurement(measures.cost, "LightKV, Fig. 1, Tables 1, 6", "FastV", 0.5),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv inspect`."""
    add, default = parser.add_argument, "default: the demo model on a held-out page"
    samples = "samples to average over: a JSONL as for `vlkv eval`, or a folder of images (with --prompt)"
    add("data", nargs="?", type=Path, metavar="DATA", help=samples)
    add("--what", required=True, metavar="NAME", help=f"one of {', '.join(WHAT)}")
    add_model_arguments(parser, required=False, help=f"a checkpoint folder, or a hub id ({default})")
    add("--image", action="append", default=[], metavar="FILE", help="an image; may be repeated")
    add("--prompt", metavar="TEXT", help="the question; needed with --model or a folder")
    add_policy_arguments(parser, default="depends on --what")
    parser.set_defaults(policy=None)  # each measurement has its own default policy
    add("--max-new-tokens", type=int, default=20, metavar="N", help="limit on the length of an answer")
    add("--samples", type=int, metavar="N", help="N random samples of DATA (default: all), or N demo pages")
    add("--seed", type=int, default=0, help="seed of random policies, of the samples and the demo pages")
    add("--out", type=Path, metavar="PNG", help="file of the picture (default: inspect-NAME.png)")
    add("--html", type=Path, metavar="FILE", help="page with the text (--what text), for all scripts")
    add("--json", action="store_true", help="print JSON; draw only with --out")


def run(args: argparse.Namespace) -> Any:
    """Prints a table and saves a picture, or returns the arrays for JSON."""
    if args.what not in WHAT:
        raise InputError(f"--what {args.what}: unknown; choose one of {', '.join(WHAT)}")
    measure, policy, out = WHAT[args.what], _policy(args), _checked(args)
    processor = loading.load_processor(args.model or CHECKPOINT)
    if not processor.config.decoder.full_layers:
        raise InputError(
            "all layers of this model have a sliding window, so no cache grows with the prompt: nothing to inspect"
        )
    samples, console = _samples(args), Console(stderr=True)
    if args.what == "text" and len(samples) > 1:
        raise InputError(f"--what text draws one prompt, and there are {len(samples)} samples: give --samples 1")
    first = inputs_of(processor, samples[0])
    check_room(processor.config, first, args.max_new_tokens)
    params = loading.load_params(args.model or CHECKPOINT, dtype=args.dtype)

    def case(number: int, record: Record) -> Case:
        images = tuple(map(open_image, record.images)) if len(samples) == 1 else ()
        key = jax.random.fold_in(jax.random.key(args.seed), number)
        return Case(params, inputs_of(processor, record), policy, key, args.max_new_tokens, images, processor)

    views = _measured(measure.view, case, samples, console)
    if args.data is None and not args.image:
        count = f"{len(samples)} held-out page{'s' if len(samples) > 1 else ''} of the demo model"
        question = "this question" if args.prompt else "its own question"
        console.print(f"no --image: of {count}, with {question}", highlight=False)
    name = "mini" if args.model is None else Path(args.model).name
    mean = f", mean of {len(views)} samples" if len(views) > 1 else ""
    view, title = mean_view(views), f"{name}: {text_of(policy, scope=True)}{mean}"
    for file in filter(None, (out, args.html)):
        save(view.panels, file, title)
    if args.json:
        about = {"what": args.what, "policy": text_of(policy), "scope": policy.scope, "samples": len(views)}
        files = {"picture": out and str(out), "page": args.html and str(args.html)}
        return plain({**about, "prompt_tokens": first.valid.sum(), **files, **view.arrays})
    _show(f"{args.what} of {title}{measure.source and f' ({measure.source})'}", view)
    Console().print(" ".join(map(str, filter(None, (out, args.html)))), highlight=False)
    return None


def _measured(
    measure: Callable[[Case], View], case: Callable[[int, Record], Case], samples: list[Record], console: Console
) -> list[View]:
    """The measurements of all samples that can be measured; says how many are left out."""
    views: list[View] = []
    problem = ""
    for number, record in enumerate(track(samples, "measuring")):
        try:
            views.append(measure(case(number, record)))
        except InputError as error:
            if len(samples) == 1:
                raise
            problem = str(error)
    if not views:
        raise InputError(f"none of {len(samples)} samples can be measured; the last error: {problem}")
    if problem:
        console.print(f"{len(samples) - len(views)} samples left out; the last error: {problem}", highlight=False)
    return views


def _checked(args: argparse.Namespace) -> Path | None:
    """The file of the picture, if there is one. Raises InputError if a number is wrong or a file cannot be written."""
    require_least(args, max_new_tokens=2, seed=0, samples=1)
    out: Path | None = args.out or (None if args.json or args.html else Path(f"inspect-{args.what}.png"))
    if out is not None:
        if args.what != "text":
            require_matplotlib()
        check_file(out, "picture", "png")
    if args.html is not None:
        if args.what != "text":
            raise InputError(f"--html is a page with the prompt's text, not with {args.what}: give --what text")
        check_file(args.html, "page", "html")
    return out


def _policy(args: argparse.Namespace) -> Policy:
    """The policy from the arguments, or else the default of the measurement."""
    if args.policy is None:
        args.policy = WHAT[args.what].policy
        if args.keep is None and args.budget is None:
            args.keep = WHAT[args.what].keep
    return policy_from(args, lambda: loading.load_processor(args.model or CHECKPOINT).config)


def _samples(args: argparse.Namespace) -> list[Record]:
    if args.data is not None:
        if args.image:
            raise InputError("give DATA or --image, not both")
        return read_samples(args.data, args.prompt, args.samples, args.seed)
    if not args.image and args.model in (None, "mini"):
        held_out = pages.held_out(args.samples or 1, args.seed)
        return [sample([page.image], args.prompt or page.question) for page in held_out]
    if args.model is None:
        raise InputError("--image needs --model: without both, the demo model reads held-out pages")
    if args.prompt is None:
        raise InputError("--model needs --prompt, the question about the image")
    if args.samples is not None:
        raise InputError(f"--samples {args.samples}: there is one sample, --image and --prompt; or give DATA")
    return [sample(args.image, args.prompt)]


def _show(title: str, view: View) -> None:
    """Prints at most `_ROWS` rows, spread evenly over the columns."""
    length = len(next(iter(view.columns.values())))
    columns = {view.rows: np.arange(length) + (view.rows != "layer"), **view.columns}
    table = Table(*columns)
    for i in np.unique(np.linspace(0, length - 1, min(length, _ROWS)).astype(int)):
        table.add_row(*(f"{x[i]:.3f}" if np.asarray(x).dtype.kind == "f" else str(x[i]) for x in columns.values()))
    console = Console()
    console.print(title, highlight=False)
    console.print(table)
