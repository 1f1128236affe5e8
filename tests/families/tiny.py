"""A tiny model and a batch of unequal rows for every family with a tower, from the entries `TINY` of `common_*.py`.

A config is read from the necessary part of a `config.json`, and images have the form that the family's processor in
transformers returns. `FAMILIES` comes from the registry, so a family that is missing here fails.
"""

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

import vlkv
from tests.families.forms import END, START, Tiny
from tests.mechanisms import IN_BITS
from tests.models import padded, random_model
from tests.programs import generate
from vlkv import families, policies
from vlkv.config import ModelConfig
from vlkv.families import config_from_hf

MODULES = [importlib.import_module(f"tests.families.{path.stem}") for path in Path(__file__).parent.glob("common_*.py")]
TINY: dict[str, Tiny] = {kind: tiny for module in sorted(MODULES, key=str) for kind, tiny in module.TINY.items()}
RAW = {kind: tiny.raw for kind, tiny in TINY.items()}
PROCESSORS = {kind: tiny.processors for kind, tiny in TINY.items() if tiny.processors}
FAMILIES = tuple(kind for kind in families.FAMILIES if kind not in families.text.FAMILIES)
NEW = 4  # tokens of every answer


# Halves compile time in a process without conftest's flags; only jaxlib 0.10 has this option.
QUICK = {"xla_cpu_use_fusion_emitters": False} if version("jaxlib").startswith("0.10.") else {}


def read_config(family: str) -> ModelConfig:
    """The tiny config of a family."""
    raw = dict(RAW[family])
    return config_from_hf({**raw, "model_type": family}, added=raw.pop("added_tokens", None))


def make_model(family: str, seed: int = 0):
    """A tiny model of a family, as `random_model` makes it."""
    return random_model(read_config(family), seed)


def make_batch(family: str, seed: int = 0, *, reverse: bool = False) -> vlkv.Inputs:
    """Rows with two images, one, and none; the second is padded on the left, the others on the right.

    `reverse`: the same rows in the reverse order.
    """
    c, rng = read_config(family), np.random.default_rng(seed)
    rows: list[tuple[list[int], dict[str, list[Any]]]] = []
    for numbers, words in (((0, 1), 12), ((2,), 9), ((), 14)):
        ids, at, extra = rng.integers(3, 90, words).tolist(), 3, {}
        for number in numbers:
            picture = TINY[family].picture(c, rng, number, len(numbers) == 1)
            ids[at:at] = [START, *[c.image_token] * picture.tokens, END]
            at += picture.tokens + 3  # one word between two images
            for name, values in picture.extra.items():
                extra.setdefault(name, []).extend(values)
        if numbers:
            extra["batch_num_images"] = [len(numbers)]
        rows.append((ids, extra))
    rows = rows[::-1] if reverse else rows
    joined: dict[str, list[Any]] = {}
    for _, extra in rows:
        for name, values in extra.items():
            joined.setdefault(name, []).extend(values)
    return vlkv.Inputs.from_hf({**padded([ids for ids, _ in rows], ("right", "left", "right")), **joined}, c)


# Methods whose defaults need more than two layers or more than one stage of merging, or keep every token.
OPTIONS: dict[str, dict[str, Any]] = {
    "duoattention": {"sinks": 1, "recent": 2},
    "avl": {"core": 0.2},
    "dart": {"layer": 1, "vision_pivots": 2, "text_pivots": 1},
    "fastv": {"layer": 1},
    "ivtp": {"layers": (1,)},
    "lightkv": {"keep": 0.5, "layers": (1,), "windows": (2,)},
    **{name: {"keep": 0.1} for name in IN_BITS},
    **{name: {"keep": 0.5, "layers": (1,)} for name in ("tome", "pitome", "tofu", "pyramiddrop", "sparsevlm")},
}


def make_policy(name: str, **options) -> policies.Policy:
    """A registered policy with options for two layers."""
    full = issubclass(policies.named(name), policies.Full)
    return policies.make(name, **({} if full else {"keep": 0.3}) | OPTIONS.get(name, {}) | options)


def answer(params, batch: vlkv.Inputs, policy: policies.Policy) -> vlkv.Output:
    """Generates `NEW` tokens for every row."""
    sampling = vlkv.Greedy(max_new_tokens=NEW, stop=())
    return generate(params, batch, policy=policy, sampling=sampling, key=jax.random.key(0))


def check_output(batch: vlkv.Inputs, output: vlkv.Output, policy: policies.Policy) -> None:
    """Asserts that every row is answered, no padding is kept, and fewer tokens are kept than the prompts have."""
    length, prompt = output.kept.sum(axis=-1), batch.valid.sum(axis=1)
    layers, _, heads = length.shape
    assert (np.asarray(output.lengths) == NEW).all()
    assert (length > 0).all()
    assert (length <= prompt[:, None]).all()
    assert not (output.kept & ~batch.valid[:, None]).any(), "padding never gets a slot"
    if not isinstance(policy, policies.Full):
        assert length[:, :2].sum() < layers * prompt[:2].sum() * heads
