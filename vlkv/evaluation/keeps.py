"""One compiled program for all keeps of a method, and how much memory each keep costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from vlkv.cache import pool_slots
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.policies.compose import Composed
from vlkv.policies.policy import Policy

_SHARING = ("scored", "allocated", "merged", "stepped")  # parts of a composition that share its budget


def at_keep(policy: Policy, keep: float) -> Policy:
    """The same policy with another `keep`."""
    if not isinstance(policy, Composed):
        return dataclasses.replace(policy, keep=keep)  # type: ignore[type-var]
    parts = {name: getattr(policy, name) for name in _SHARING}
    return dataclasses.replace(
        policy, **{name: at_keep(part, keep) for name, part in parts.items() if part is not None}
    )  # type: ignore[type-var]


def share_programs(plan: Sequence[Policy]) -> list[Policy]:
    """For every policy the one whose program it can use: the same options, and the largest keep in the plan.

    A policy that shortens the prompt, or caps its layers, has a program of its own.
    """
    largest: dict[Any, Policy] = {}
    keys = [_key(policy) or policy for policy in plan]
    for key, policy in zip(keys, plan, strict=True):
        before = largest.get(key)
        if before is None or (policy.keep or 1) > (before.keep or 1):
            largest[key] = policy
    return [largest[key] for key in keys]


def _key(policy: Policy) -> Policy | None:
    """What policies have in common that differ in their keep alone; None: they can share nothing."""
    if policy.reducer is not None or policy.cap is not None or policy.keep is None:
        return None
    try:
        return at_keep(policy, 1.0)
    except InputError:  # another option is tied to the keep
        return None


def totals(policy: Policy, program: Policy, *, layers: int, length: int) -> Int[np.ndarray, " counts"] | None:
    """What `fill_cache_with` needs to run `policy` in the program of another: None if it is its own."""
    return None if policy is program else policy.totals(layers=layers, most=length)


def pool_bytes(policy: Policy, config: ModelConfig, inputs: Inputs, *, number: int = 2) -> int:
    """Bytes of keys and values that `generate` allocates for the prompt of one row, without its tail.

    Args:
        policy: decides how many entries, and in how many bits.
        config: of the model.
        inputs: whose bounds count.
        number: bytes of a number that is not quantised; 2 is bfloat16.
    """
    decoder = config.decoder
    slots = pool_slots(
        policy, layers=decoder.layers, vision=inputs.max_vision, text=inputs.max_text, new_tokens=0,
        images=inputs.max_images,
    )  # fmt: skip
    return round(2 * slots * decoder.kv_heads * decoder.head_dim * number * relative_size(policy, number=number))


def relative_size(policy: Policy, *, number: int = 2) -> float:
    """Bytes of a stored entry as a share of an entry that is not quantised; ranges of groups are counted."""
    if policy.storage is None:
        return 1.0
    bits, group = policy.storage
    return bits / (8 * number) + 2 / group
