"""A policy whose budgets differ per head."""

from __future__ import annotations

import jax.numpy as jnp

from vlkv import policies
from vlkv.compression import budgets
from vlkv.compression.policy import Facts

RATIO = 10


class Uneven(policies.SnapKV):
    """Every other head gets ten times the budget of its neighbour."""

    facts = Facts(
        budgets="heads",
    )

    def statistics(self, obs, scores):
        del obs
        return {"weight": jnp.where(jnp.arange(len(scores)) % 2 == 0, 1.0, RATIO)}

    def allocate(self, statistics, *, total, most, layers):
        weight, heads = statistics["weight"], statistics["weight"].shape[1]
        real = heads * total * weight / jnp.sum(weight)
        ceiling = jnp.broadcast_to(most[:, None], weight.shape).reshape(-1)
        return budgets.apportion(real.reshape(-1), heads * total, floor=0, ceiling=ceiling).reshape(layers, heads)
