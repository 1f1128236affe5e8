"""The grid of measurements (policy x keep x batch x prompt length), and the bytes that each point needs.

Axes: B batch · T prompt · V vision tokens · S new tokens · L layers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from vlkv.analysis.cost import row_bytes
from vlkv.compression.checking import require_layers
from vlkv.compression.sizes import cache_spec
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.policies import Full, Policy, text_of
from vlkv.tools.benching.shapes import images_of


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """One prompt length and batch size. All policies of a setting are measured alternately."""

    batch: int
    prompt: int  # tokens of a row
    text: int  # text tokens, at the end of the row; the others are vision tokens
    new: int  # generated tokens

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "new", "text"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.new < 2:
            raise InputError(f"new={self.new} must be at least 2: the first token belongs to the prefill")
        if self.text > self.prompt:
            raise InputError(f"text={self.text} must not exceed the prompt of {self.prompt} tokens")

    @property
    def vision(self) -> int:
        """Vision tokens of a row."""
        return self.prompt - self.text

    @property
    def size(self) -> int:
        """Entries of the full cache, by which settings are sorted."""
        return self.batch * (self.prompt + self.new)


def grid(config: ModelConfig, *, batches: Iterable[int], prompts: Iterable[int], text: int, new: int) -> list[Setting]:
    """All settings, the smallest first. The prompt of a text model is all text."""
    settings = {Setting(batch, prompt, prompt if config.vision is None else text, new)
                for batch, prompt in itertools.product(batches, prompts)}  # fmt: skip
    return sorted(settings, key=lambda setting: setting.size)


def check_policy(policy: Policy, config: ModelConfig) -> None:
    """Raises InputError if a policy cannot be measured on this model. Called before anything is compiled."""
    name = type(policy).__name__
    require_layers(policy, config.decoder.full_layers)
    if config.vision is None and policy.scope == "vision" and policy.facts.selects:
        raise InputError(f"{name} compresses vision tokens, but {config.family} has none: use --scope all")


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves, which are arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache_bytes(policy: Policy, config: ModelConfig, setting: Setting, itemsize: int) -> float:
    """Bytes of the allocated cache of all rows, without the arrays that say which token is where."""
    c = config.decoder
    spec = cache_spec(
        policy, layers=c.full_layers, vision=setting.vision, text=setting.text, new_tokens=setting.new,
        images=images_of(setting.vision), windows=c.sliding,
    )  # fmt: skip
    return setting.batch * row_bytes(spec, c, itemsize)


def label(policy: Policy) -> str:
    """The name of a policy in tables."""
    return "full cache" if policy == Full() else text_of(policy, scope=True)


def with_full(contestants: Sequence[Policy]) -> list[Policy]:
    """The full cache first, and each policy once."""
    return list(dict.fromkeys([Full(), *contestants]))
