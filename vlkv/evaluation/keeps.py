"""Policies at equal bytes: other keeps and bits, one compiled program for all, and the bytes that each allocates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vlkv.cache import pool_slots
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.policies.compose import Composed, compose
from vlkv.policies.kivi import KIVI
from vlkv.policies.policy import Budget, Policy

_SHARING = ("scored", "allocated", "merged", "stepped")  # parts of a composition that share its budget


def at_keep(policy: Policy, keep: float) -> Policy:
    """The same policy with another `keep`.

    Raises:
        InputError: an option of the policy contradicts this keep.
    """
    if not isinstance(policy, Composed):
        return dataclasses.replace(policy, keep=keep)  # type: ignore[type-var]
    parts: dict[str, Any] = {name: getattr(policy, name) for name in _SHARING}
    parts = {name: at_keep(part, keep) for name, part in parts.items() if part is not None}
    return dataclasses.replace(policy, **parts)


def at_bytes(policy: Policy, share: float, bits: int = 16) -> Policy:
    """The policy stored in so many bits, with the number of entries that fits in a share of the bytes.

    Args:
        policy: any; its `keep` is replaced.
        share: of the bytes that all tokens in scope take in 16 bits, in (0, 1].
        bits: 16, or what `KIVI` offers. The ranges of its groups are counted.

    Raises:
        InputError: an option of the policy contradicts the keep, or KIVI does not offer the bits.
    """
    if bits == 16:
        return at_keep(policy, share)
    store = KIVI(bits=bits)
    return compose(at_keep(policy, min(1.0, share / relative_size(store))), store=store)


def relative_size(policy: Policy, *, number: int = 2) -> float:
    """Bytes of a stored entry relative to one that is not quantised and has `number` bytes per channel."""
    if policy.storage is None:
        return 1.0
    bits, group, _ = policy.storage
    return bits / (8 * number) + 2 / group


def share_programs(plan: Sequence[Policy]) -> list[Policy]:
    """For each policy, the policy whose compiled program it can use: same options, largest keep in the plan.

    A policy that reduces the prompt or caps its layers has a program of its own.
    """
    largest: dict[Any, Policy] = {}
    keys = [_key(policy) or policy for policy in plan]
    for key, policy in zip(keys, plan, strict=True):
        before = largest.get(key)
        if before is None or (policy.keep or 1) > (before.keep or 1):
            largest[key] = policy
    return [largest[key] for key in keys]


def _key(policy: Policy) -> Policy | None:
    """The same for policies that differ in their keep alone; None if the policy shares its program with none."""
    if policy.reducer is not None or policy.cap is not None or policy.keep is None:
        return None
    if any(getattr(part, "variant", "paper") != "paper" for part in getattr(policy, "parts", (policy,))):
        return None  # published code has formulas of the keep
    try:
        return at_keep(policy, 1.0)
    except InputError:
        return None  # another option is tied to the keep


def budget(policy: Policy, program: Policy, *, layers: int, length: int) -> Budget | None:
    """What `fill_cache_with` needs to run `policy` in another policy's program; None if the program is its own."""
    if policy is program:
        return None
    return Budget(np.asarray(policy.keep, np.float32), policy.totals(layers=layers, most=length))


def pool_bytes(policy: Policy, config: ModelConfig, inputs: Inputs, *, number: int = 2) -> int:
    """Bytes of keys and values that `generate` allocates for the prompt of one row, without its tail.

    Args:
        policy: decides the number of entries and their bits.
        config: of the model.
        inputs: its static bounds decide the size.
        number: bytes of a number that is not quantised; 2 is bfloat16.
    """
    decoder = config.decoder
    heads, channels = decoder.kv_heads, decoder.head_dim
    slots = pool_slots(
        policy, layers=decoder.layers, vision=inputs.max_vision, text=inputs.max_text, new_tokens=0,
        images=inputs.max_images,
    )  # fmt: skip
    if policy.storage is None:
        return 2 * slots * heads * channels * number
    bits, group, _ = policy.storage
    codes = slots * heads * channels * bits // 8
    ranges = 2 * number * heads * (-(-slots // group) * channels + slots * -(-channels // group))
    return 2 * codes + ranges


def share_of_bytes(policy: Policy, config: ModelConfig, inputs: Inputs) -> float:
    """Bytes of the vision entries that a policy may keep of a prompt, as a share of all of them in 16 bits.

    Under scope="all" the text counts as well, on both sides.
    """
    layers, text = config.decoder.layers, inputs.max_text
    kept = policy.bound(layers=layers, vision=inputs.max_vision, text=text, images=inputs.max_images)
    kept, every = (
        (kept - layers * text, inputs.max_vision) if policy.scope == "vision" else (kept, inputs.max_vision + text)
    )
    return kept * relative_size(policy) / (layers * every)
