"""Read an unseen page of real handwritten digits with eight policies: a table, and a picture of what survived.

vlkv demo
vlkv demo --seed 3 --out digits.png
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vlkv import loading, policies
from vlkv.cache import PackedCache
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generate import decode_step
from vlkv.inputs import Inputs
from vlkv.mini import CHECKPOINT, pages
from vlkv.policies import Policy
from vlkv.prefill import fill_cache
from vlkv.processing import Processor
from vlkv.reading import Prompt, read_prompt

METHODS = ("Random", "StreamingLLM", "H2O", "SnapKV", "PyramidKV", "AirCache", "PrefixKV")  # all would take minutes
KEEPS = (0.2, 0.1, 0.05)
SHOWN = 0.1  # the keep of the picture
NEW_TOKENS = 48
# A third off the time to compile, nothing off the speed of so small a model.
_QUICK = {"xla_llvm_disable_expensive_passes": True}
_read_prompt = jax.jit(read_prompt, compiler_options=_QUICK)
_fill_cache = jax.jit(fill_cache, static_argnames="new_tokens", compiler_options=_QUICK)
_decode_step = jax.jit(decode_step, donate_argnames="cache", compiler_options=_QUICK)


class Row(NamedTuple):
    """One line of the table."""

    policy: str
    keep: float
    answer: str
    right: bool
    kept: float  # vision tokens per layer and head, on average
    bytes: int
    milliseconds: float  # per token
    survived: np.ndarray  # [L, V] share of the heads that keep each vision token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv demo`."""
    parser.add_argument("--seed", type=int, default=0, help="which page")
    parser.add_argument("--out", type=Path, default=Path("vlkv_demo.png"), metavar="PNG", help="where the picture goes")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """The whole demonstration."""
    if not args.out.parent.is_dir():
        raise InputError(f"{args.out.parent}: no such folder to write the picture into")
    if args.out.suffix.lower() != ".png":
        raise InputError(f"{args.out}: the picture is a PNG; give a name that ends in .png")
    if args.seed < 0:
        raise InputError(f"--seed {args.seed} must not be negative")
    console = Console(stderr=args.json)
    params, processor = loading.load(CHECKPOINT)
    page = pages.compose(pages.held_out_digits(), np.random.default_rng(args.seed), rows=(4, 4))
    question, truth = pages.question(), page.answer()
    inputs = processor(page.image, question)
    plan: list[Policy] = [policies.Full()]
    for name in METHODS:
        plan += [policies.make(name, keep=keep, scope="vision") for keep in KEEPS]
    prompt = _read_prompt(params, inputs)
    rows = [
        read(params, processor, inputs, prompt, policy, truth)
        for policy in track(plan, "compiling and reading", console=Console(stderr=True), transient=True)
    ]
    draw(page.image, rows).save(args.out)
    if args.json:
        table = [{k: v for k, v in row._asdict().items() if k != "survived"} for row in rows]
        return json.loads(json.dumps({"question": question, "truth": truth, "rows": table, "picture": str(args.out)}))
    show(console, question, truth, rows)
    console.print(f"which vision tokens survived, keep = {SHOWN:.0%}: {args.out}", highlight=False)
    return None


def read(params: Model, processor: Processor, inputs: Inputs, prompt: Prompt, policy: Policy, truth: str) -> Row:
    """One answer, token by token, timed."""
    cache = _fill_cache(prompt, policy, new_tokens=NEW_TOKENS, key=jax.random.key(0))
    size, survived = cache.bytes, survivors(cache, inputs)
    tokens, seconds = [int(prompt.logits[0].argmax())], []
    while tokens[-1] not in params.config.stop and len(tokens) < NEW_TOKENS:
        begin = time.perf_counter()
        cache, logits = _decode_step(params, cache, np.array(tokens[-1:], np.int32))
        tokens.append(int(logits[0].argmax()))
        seconds.append(time.perf_counter() - begin)
    answer = str(processor.decode(np.array(tokens)))
    milliseconds = 1e3 * float(np.median(seconds[1:] or [float("nan")]))  # the first step compiles
    return Row(
        type(policy).__name__, policy.keep or 1.0, answer, answer == truth, float(survived.sum(axis=1).mean()), size,
        milliseconds, survived,
    )  # fmt: skip


def survivors(cache: PackedCache, inputs: Inputs) -> np.ndarray:
    """[L, V]: which share of the heads still holds each vision token, per layer."""
    where = np.asarray(inputs.vision_index[0])
    layers, _, heads = cache.start.shape
    share = np.zeros((layers, inputs.max_vision))
    for layer in range(layers):
        held = cache.entries(layer, len(where))
        for token in np.asarray(held[0]):
            index = where[token[token >= 0]]
            share[layer, index[index >= 0]] += 1 / heads
    return share


def show(console: Console, question: str, truth: str, rows: list[Row]) -> None:
    """The table."""
    table = Table("policy", "keep", "answer", "", "kept", "cache KiB", "ms/token", title=f"{question} -> {truth}")
    for row in rows:
        mark = "[green]right[/]" if row.right else "[red]wrong[/]"
        table.add_row(
            row.policy, f"{row.keep:.0%}", row.answer, mark, f"{row.kept:.1f}", f"{row.bytes / 1024:.0f}",
            f"{row.milliseconds:.2f}",
        )  # fmt: skip
    console.print(table)


def draw(page: Image.Image, rows: list[Row], side: int = 120, gap: int = 8, label: int = 110) -> Image.Image:
    """The page, and for every policy and layer the page again with the evicted tokens faded."""
    shown = [row for row in rows if row.keep in (SHOWN, 1.0)]
    layers, cells = rows[0].survived.shape
    grid = round(cells**0.5)
    sheet = Image.new("RGB", (label + layers * (side + gap), (len(shown) + 1) * (side + gap) + 20), "white")
    pen = ImageDraw.Draw(sheet)
    sheet.paste(page.resize((side, side), Image.Resampling.NEAREST), (label, 0))
    for layer in range(layers):
        pen.text((label + layer * (side + gap), side + gap), f"layer {layer}", fill="black")
    base = np.asarray(page.resize((side, side), Image.Resampling.NEAREST), np.float32)
    faded = 0.18 * base + 0.82 * np.array([225, 228, 235])
    for i, row in enumerate(shown):
        top = (i + 1) * (side + gap) + 20
        pen.text((0, top + side // 2 - 6), f"{row.policy}\n{'right' if row.right else 'wrong'}", fill="black")
        for layer in range(layers):
            share = Image.fromarray(row.survived[layer].reshape(grid, grid).astype(np.float32))
            weight = np.asarray(share.resize((side, side), Image.Resampling.NEAREST))[..., None]
            picture = Image.fromarray((weight * base + (1 - weight) * faded).astype(np.uint8))
            sheet.paste(picture, (label + layer * (side + gap), top))
    return sheet
