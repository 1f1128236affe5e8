"""Numbers of entries that follow from a policy's `totals`: budgets, and the limits of a cap.

All numbers are per key head. Tables are made on the host, because float32 would round the product of a count and a
fraction. Axes: L layers.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.policies.policy import Policy

P = TypeVar("P")


def nominal_totals(policy: Policy, *, layers: int, most: int) -> Int[Array | np.ndarray, " counts"]:
    """Number of entries that `keep` or `budget` means for all layers together, for 0..most tokens in scope of each."""
    return Policy.totals(policy, layers * np.arange(most + 1), layers=layers, text=most)


def total(
    policy: Policy, counts: Int[Array, " L"], seen: Int[Array, ""], *, layers: int, most: int, text: int
) -> Int[Array, ""]:
    """Number of entries that all layers together may keep of one prompt.

    Args:
        policy: any policy.
        counts: number of tokens in scope of each layer.
        seen: number of tokens in scope of the prompt, before it was reduced.
        layers: L.
        most: bound on `counts` and `seen`.
        text: bound on the text tokens.
    """
    if policy.reducer is None or policy.counts_dropped:
        return jnp.asarray(policy.totals(layers * np.arange(most + 1), layers=layers, text=text))[seen]
    return jnp.asarray(policy.totals(np.arange(layers * most + 1), layers=layers, text=text))[jnp.sum(counts)]


def cap_counts(policy: Policy, *, layers: int, most: int) -> Int[np.ndarray, " counts"]:
    """Greatest number of entries in scope of one layer with `cap`, for 0..most tokens in scope."""
    assert policy.cap is not None
    mean = nominal_totals(policy, layers=layers, most=most) / layers
    return np.minimum(np.arange(most + 1), np.ceil(policy.cap * mean)).astype(np.int32)


def most_candidates(policy: Policy, *, layers: int, vision: int, text: int) -> int:
    """Bound on the tokens of one layer under the `cap`, for prompts of at most these tokens; out of scope included."""
    if policy.scope == "all":
        return int(cap_counts(policy, layers=layers, most=vision + text)[-1])
    return int(cap_counts(policy, layers=layers, most=vision)[-1]) + text


class Budget(NamedTuple):
    """The budget of a policy as arrays, so that policies that differ only in `keep` share one compiled program."""

    keep: Float[Array | np.ndarray, ""]
    totals: Int[Array | np.ndarray, " counts"]  # result of `nominal_totals`


def with_budget(given: P, budget: Budget) -> P:
    """A copy of a policy and its parts with this budget. It is only for tracing, because its options are not static."""
    copied = copy.copy(given)
    object.__setattr__(copied, "keep", budget.keep)
    object.__setattr__(copied, "_totals", budget.totals)
    for field in dataclasses.fields(given):  # type: ignore[arg-type]
        part = getattr(given, field.name)
        if isinstance(part, Policy):
            object.__setattr__(copied, field.name, with_budget(part, budget))
    return copied
