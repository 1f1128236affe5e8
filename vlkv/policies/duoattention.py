from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from vlkv.compression.observe import Observation, group_mean, rows_mass
from vlkv.compression.option_types import Count, Positive
from vlkv.compression.policy import Budgets, Facts, Mask, PerLayer, Policy, Scores, Statistics
from vlkv.errors import InputError
from vlkv.masks import first, last, ordinal


class DuoAttention(Policy):
    """Retrieval heads keep all tokens, streaming heads only the first and the most recent ones (Xiao et al. 2025).

    As many heads are retrieval heads as the budget allows, those with the largest values; one more head keeps the
    recent tokens for which there is room.

    Attributes:
        sinks: number of first tokens that every head keeps.
        recent: number of most recent tokens that every head keeps.
        heads: values of all layers and key heads, for example published ones. None: they are measured on each prompt,
            as the share of a head's attention that goes to other tokens than sinks and recent ones.
        window: number of rows at the end of the prompt whose attention is measured.
    """

    sinks: Count = 128
    recent: Count = 256
    heads: tuple[tuple[float, ...], ...] | None = None
    window: Positive = 32
    facts = Facts(budgets="heads")
    newest = property(lambda self: self.window)

    def check_model(self, layers: int) -> None:
        if self.heads is not None and len(self.heads) != layers:
            raise InputError(f"DuoAttention: heads has {len(self.heads)} layers, the model has {layers}")

    def score(self, obs: Observation) -> Scores:
        return jnp.broadcast_to(ordinal(obs.valid).astype(jnp.float32), obs.k.shape[:2])

    def protect(self, obs: Observation) -> Mask:
        sinks = jnp.minimum(self.sinks, obs.mean_budget)
        return first(obs.valid, sinks) | last(obs.valid, jnp.minimum(self.recent, obs.mean_budget - sinks))

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        """`retrieval` [K]: the value of each head."""
        if self.heads is None:
            mass = group_mean(rows_mass(obs, last(obs.valid, self.window), self.window), len(obs.k))
            between = jnp.sum(mass, axis=1, where=obs.valid & ~self.protect(obs))
            return {"retrieval": between / jnp.maximum(jnp.sum(mass, axis=1, where=obs.valid), 1e-30)}
        if wrong := {len(row) for row in self.heads} - {len(obs.k)}:
            raise InputError(f"DuoAttention: heads has {wrong.pop()} heads in a layer, the model has {len(obs.k)}")
        return {"retrieval": jnp.array(self.heads, jnp.float32)[obs.layer]}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        retrieval = statistics["retrieval"]  # [L, K]
        least = jnp.minimum(self.sinks + self.recent if self.scope == "all" else 0, total // layers)
        base = jnp.broadcast_to(jnp.minimum(least, most)[:, None], retrieval.shape)
        order = jnp.argsort(-retrieval.reshape(-1), stable=True)
        missing = (most[:, None] - base).reshape(-1)[order]
        room = retrieval.shape[1] * total - jnp.sum(base)
        more = jnp.clip(room - (jnp.cumsum(missing) - missing), 0, missing)
        return base + jnp.zeros_like(missing).at[order].set(more).reshape(base.shape)
