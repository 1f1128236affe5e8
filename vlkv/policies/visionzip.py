from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from vlkv.compression import budgets, merging
from vlkv.compression.option_types import Unit
from vlkv.compression.policy import Mask, Observation
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import ordinal, top


class VisionZip(ReducingPolicy):
    """Keeps dominant tokens, by class attention, and contextual tokens that represent the others (Yang et al. 2024).

    Of the tokens that are not dominant, every s-th one is a target, in raster order, where s is their number divided by
    the number of contextual tokens. A contextual token is the sum of the target and of the mean of the tokens that are
    most similar to it, by the embeddings after the projector.

    Attributes:
        contextual: share of the budget for contextual tokens, rounded down; in the paper 10 of 64.
    """

    contextual: Unit = 0.15625
    class_attention_layers = (-1,)  # the last block that runs

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        vision, attention = tokens.valid & tokens.is_vision, tokens.tower_attention[-1]
        count = self.count(vision)
        groups = budgets.share(self.contextual, count, vision.shape[0])
        dominant = top(attention[None], vision, (count - groups)[None])[0]
        rest = vision & ~dominant
        step = jnp.maximum(jnp.sum(rest) // jnp.maximum(groups, 1), 1)
        place = ordinal(rest)
        targets = rest & (place % step == 0) & (place // step < groups)
        tokens = self.merged(tokens, targets, rest & ~targets & (groups > 0))
        return tokens, tokens.valid & (~tokens.is_vision | dominant | targets)

    def merged(self, tokens: Tokens, targets: Mask, joining: Mask) -> Tokens:
        """Adds to each target the mean of the tokens that are most similar to it."""
        target = merging.nearest_key(tokens.x[None], targets[None])[0][0]
        full, amount = tokens.x.astype(jnp.float32), joining.astype(jnp.float32)
        count = jnp.zeros_like(amount).at[target].add(amount)
        total = jnp.zeros_like(full).at[target].add(full * amount[:, None])
        x = full + total / jnp.maximum(count, 1)[:, None]
        size = tokens.size.at[target].add(jnp.where(joining, tokens.size, 0.0))
        return dataclasses.replace(tokens, x=x.astype(tokens.x.dtype), size=size)
