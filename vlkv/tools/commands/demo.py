"""Ask one question about an unseen page with several methods: a table, and a picture of the patches that each keeps.

Without arguments the demo model reads a ledger page of handwritten digits: 576 vision tokens, of which the answer needs
the five or so of one entry. With --image, --question and --model it shows the same for your own data.

  vlkv demo
  vlkv demo --model FOLDER --image page.png --question "what does the sign say?"
"""

import argparse
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from vlkv import analysis, loading, policies
from vlkv.analysis.cost import cache_bytes, full_attention
from vlkv.analysis.drawing import Panel, draw, fitted
from vlkv.compression.compose import at_keep
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.files import plain
from vlkv.generation import jitted
from vlkv.generation.decode import check_room, decode_step
from vlkv.generation.nan import check_values
from vlkv.generation.prefill import fill_cache_with
from vlkv.generation.prompt import Prompt, read_prompt
from vlkv.inputs import Inputs
from vlkv.mini import CHECKPOINT, pages
from vlkv.policies import AirCache, Policy, Smooth, compose
from vlkv.processing import Processor
from vlkv.processing.images import open_image
from vlkv.terminal import track
from vlkv.tools.commands.options import require_least
from vlkv.tools.commands.plots import check_file
from vlkv.tools.evaluation.keeps import at_bytes, budget, share_of_bytes

METHODS = ("ImgRandom", "SnapKV", "AirCache")  # with default settings
BYTES = (0.1, 0.02)  # shares of the bytes that the vision entries of a full 16-bit cache take
SHOWN = 0.02  # the share that the picture shows
NEW_TOKENS = 16
BEST = "AirCache smooth 4-bit"
_held = jax.jit(analysis.held, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0})


class Row(NamedTuple):
    """One line of the table."""

    name: str
    share: float  # of the bytes of a full cache's vision entries
    answer: str
    right: bool  # or, if the right answer is unknown, whether it equals the full cache's
    recall: float | None  # share of the evidence that is kept, mean over layers and heads
    bytes: int  # of the entries of the image, in 16 bits if they are not quantised
    kept: np.ndarray  # [T] share of the layers and heads that hold each prompt token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv demo`."""
    parser.add_argument("--seed", type=int, default=0, help="which page of the demo model (default: 0)")
    parser.add_argument("--model", metavar="DIR", help="a checkpoint folder or a hub id, for your own data")
    parser.add_argument("--image", metavar="FILE", help="your own image; needs --question and --model")
    parser.add_argument("--question", metavar="TEXT", help="question about the image")
    parser.add_argument("--out", type=Path, default=Path("vlkv_demo.png"), metavar="PNG", help="file of the picture")
    parser.add_argument("--json", action="store_true", help="print JSON")


class Case(NamedTuple):
    """The question. Answer and evidence are known only for the demo's own pages."""

    folder: Any
    processor: Processor
    inputs: Inputs
    image: Image.Image
    question: str
    truth: str | None
    evidence: np.ndarray | None  # [1, T]
    programs: Any = jitted


def run(args: argparse.Namespace) -> Any:
    """Runs the demo."""
    check_file(args.out, "picture", "png")
    require_least(args, seed=0)
    console = Console(stderr=args.json)
    case = find_case(args)
    check_room(case.processor.config, case.inputs, NEW_TOKENS)
    params = loading.load_params(case.folder)
    prompt = case.programs.read_prompt(params, case.inputs, new_tokens=NEW_TOKENS)
    check_values(params, case.inputs, prompt.logits)
    rows: list[Row] = []
    for name, share, policy in track(plan(), "compiling and reading"):
        rows.append(read(params, case, prompt, name, share, policy, rows[0].answer if rows else None))
    title = f"What is left of the image at {SHOWN:.0%} of its bytes in the cache"
    shown = fitted(case.image, analysis.on_grid(rows[0].kept, case.inputs.grid[0])[0].shape, "crop")
    answer = f"Full cache: {rows[0].answer}" if case.truth is None else f"Answer: {case.truth}"
    draw(title, shown, panels(case, rows), f"Question: {case.question}   {answer}").save(args.out)
    if args.json:
        table = [{k: v for k, v in row._asdict().items() if k != "kept"} for row in rows]
        return plain({"question": case.question, "truth": case.truth, "rows": table, "picture": str(args.out)})
    show(console, case, rows)
    console.print(f"what each method keeps at {SHOWN:.0%} of the bytes: {args.out}", highlight=False)
    return None


def find_case(args: argparse.Namespace) -> Case:
    """The user's question, or one about an unseen page."""
    options = (args.model, args.image, args.question)
    if any(value is not None for value in options):
        if None in options:
            raise InputError("--image, --question and --model must be given together, or not at all")
        processor = loading.load_processor(args.model)
        image = open_image(args.image)
        return Case(args.model, processor, processor(image, args.question), image, args.question, None, None)
    processor = loading.load_processor(CHECKPOINT)
    page, entry = pages.held_out_page(np.random.default_rng(args.seed), "right")
    inputs = processor(page.image, entry.question)
    evidence = np.isin(np.cumsum(inputs.is_vision, axis=1) - 1, entry.evidence) & inputs.is_vision
    return Case(CHECKPOINT, processor, inputs, page.image, entry.question, entry.answer, evidence, unoptimised())


def unoptimised() -> Any:
    """The programs of the demo model, which XLA compiles in half the time without its optimisations.

    A small model is fast without them. On a CPU, jaxlib 0.10 also has older emitters of code, which take a third of the
    time that is left, because a program has many small fusions.
    """
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if jax.default_backend() == "cpu" and version("jaxlib").startswith("0.10."):
        options["xla_cpu_use_fusion_emitters"] = False
    jit = partial(jax.jit, compiler_options=options)
    return SimpleNamespace(
        read_prompt=jit(read_prompt),
        fill_cache_with=jit(fill_cache_with, static_argnames="new_tokens"),
        decode_step=jit(decode_step),
    )


def plan() -> list[tuple[str, float, Policy]]:
    """Name, share of the bytes and policy of every row."""
    best = compose(AirCache(keep=1.0, window="text"), smooth=Smooth(8, one_sided=True, pooling="max"))
    # `policies.Full` would compile a program of its own; with keep=1 any method keeps everything.
    full: tuple[str, float, Policy] = ("Full", 1.0, policies.ImgRandom(keep=1.0))
    named = [(name, share, policies.make(name, keep=share, scope="vision")) for name in METHODS for share in BYTES]
    return [full, *named, *((BEST, share, at_bytes(best, share, bits=4)) for share in BYTES)]


def read(params: Model, case: Case, prompt: Prompt, name: str, share: float, policy: Policy, full: str | None) -> Row:
    """Generates one answer token by token.

    Every budget uses the program and the memory of keep = 1, so that each method is compiled once.
    """
    at_most = at_keep(policy, 1.0)
    options = dict(new_tokens=NEW_TOKENS, key=jax.random.key(0))
    cache = case.programs.fill_cache_with(prompt, at_most, budget(policy, at_most, prompt), **options)
    kept = np.asarray(_held(cache, prompt.valid.shape[1]))[0].mean(axis=0)
    recall = None if case.evidence is None else float(kept[case.evidence[0]].mean())
    tokens = [int(np.argmax(prompt.logits[0]))]
    while tokens[-1] not in params.config.stop and len(tokens) < NEW_TOKENS:
        cache, logits = case.programs.decode_step(params, cache, np.array(tokens[-1:], np.int32))
        check_values(params, case.inputs, logits)
        tokens.append(int(np.argmax(logits[0])))
    answer = str(case.processor.decode(np.array(tokens)))
    right = answer == case.truth if case.truth is not None else answer == (full or answer)
    decoder, vision = full_attention(params.config.decoder), int(case.inputs.is_vision.sum())
    full_bytes = cache_bytes(decoder, np.full(decoder.layers, vision), itemsize=2).sum()
    size = round(full_bytes * share_of_bytes(policy, params.config, case.inputs))
    return Row(name, share, answer, right, recall, size, kept)


def show(console: Console, case: Case, rows: list[Row]) -> None:
    """Prints the table."""
    title = escape(case.question if case.truth is None else f"{case.question} -> {case.truth}")
    known = case.evidence is not None
    recall = [Column("evidence", no_wrap=True)] if known else []
    table = Table("method", "bytes", "answer", Column("", no_wrap=True), *recall, "KiB", title=title)
    for row in rows:
        colour = None if case.truth is None else "green" if row.right else "red"
        mark = Text(verdict(case, row), colour or "")
        kept = [] if row.recall is None else [f"{row.recall:.0%}"]
        table.add_row(row.name, f"{row.share:.0%}", escape(row.answer), mark, *kept, f"{row.bytes / 1024:.1f}")
    console.print(table)
    console.print('bytes, KiB: of the image\'s entries in the cache, in 16 bits; all text is kept (scope="vision").')
    if known:
        console.print("evidence: share of the needed tokens that is kept, mean over layers and heads.")


def verdict(case: Case, row: Row) -> str:
    """Whether the answer is right, or, if the right one is unknown, equals the full cache's."""
    names = ("wrong", "right") if case.truth is not None else ("differs", "as full")
    return names[row.right]


def panels(case: Case, rows: list[Row]) -> list[Panel]:
    """Maps of the full cache, then of every method at the share `SHOWN`."""
    grid = case.inputs.grid[0]
    frame = None if case.evidence is None else grid[case.evidence[0]][:, 1:]
    drawn = []
    for row in (row for row in rows if row.share in (SHOWN, 1.0)):
        kept = None if row.share == 1.0 else analysis.on_grid(row.kept, grid)[0]
        recall = "" if row.recall is None else f"{row.recall:.0%} of evidence, "
        size = f"{row.bytes / 1024:.0f}{'' if kept is None else f' of {rows[0].bytes / 1024:.0f}'} KiB"
        drawn.append(Panel(row.name, row.answer, verdict(case, row), recall + size, kept, frame))
    return drawn
