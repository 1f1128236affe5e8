"""The grid: policy x keep x batch x prompt length, and how many bytes each point of it needs.

Axes: B batch · T prompt · V vision tokens · S new tokens · L layers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from vlkv.benching.shapes import images_of
from vlkv.cache import pool_slots
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.policies import Full, Policy


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """One prompt: the contestants of one setting are measured in turn."""

    batch: int
    prompt: int  # tokens of a row
    text: int  # of them at the end; the others are vision tokens
    new: int  # tokens generated

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
        """V."""
        return self.prompt - self.text

    @property
    def size(self) -> int:
        """By which settings are put in order: entries of the full cache."""
        return self.batch * (self.prompt + self.new)


def grid(config: ModelConfig, *, batches: Iterable[int], prompts: Iterable[int], text: int, new: int) -> list[Setting]:
    """All settings, the smallest first; a text model's prompt is all text."""
    made = []
    for batch, prompt in itertools.product(batches, prompts):
        made.append(Setting(batch, prompt, prompt if config.vision is None else text, new))
    return sorted(set(made), key=lambda setting: setting.size)


def check_policy(policy: Policy, config: ModelConfig) -> None:
    """Raises InputError if a policy cannot be timed on this model: before anything is compiled."""
    name = type(policy).__name__
    policy.check_model(config.decoder.layers)
    if config.vision is None and policy.scope == "vision" and not isinstance(policy, Full):
        raise InputError(f"{name} spends its budget on vision tokens, of which {config.family} has none: --scope all")


def tree_bytes(tree: Any) -> int:
    """Of all leaves, arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache_bytes(policy: Policy, config: ModelConfig, setting: Setting, itemsize: int) -> int:
    """Keys and values as they will be allocated, of all rows, before any quantisation."""
    c = config.decoder
    slots = pool_slots(
        policy, layers=c.layers, vision=setting.vision, text=setting.text, new_tokens=setting.new,
        images=images_of(setting.vision),
    )  # fmt: skip
    return 2 * setting.batch * slots * c.kv_heads * c.head_dim * itemsize


def label(policy: Policy) -> str:
    """ "AirCache 10%": how tables call a contestant."""
    name = type(policy).__name__
    if isinstance(policy, Full):
        return "full cache"
    if policy.budget is not None:
        return f"{name} {policy.budget}"
    return f"{name} {policy.keep:.3g}"


def with_full(contestants: Sequence[Policy]) -> list[Policy]:
    """The full cache first, and each policy once."""
    return list(dict.fromkeys([Full(), *contestants]))
