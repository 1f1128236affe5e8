from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from vlkv.compression import matching
from vlkv.compression.option_types import Count, Positive
from vlkv.compression.policy import Mask, Observation
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import top


class DART(ReducingPolicy):
    """After `layer` layers, keeps the tokens with the least similarity to pivots (Wen et al. 2025, Sec. 3.2).

    Pivots are the vision tokens and the instruction tokens whose keys have the largest L1 norms. Vision pivots are
    kept. Then each pivot, vision first and larger norms first, takes its share of the remaining budget: the vision
    tokens whose hidden states have the smallest cosine with its own.

    Attributes:
        layer: number of layers that process all tokens.
        vision_pivots: number of vision pivots, at most the budget.
        text_pivots: number of text pivots.
    """

    layer: Positive = 2
    vision_pivots: Positive = 4
    text_pivots: Count = 4

    def reductions(self, layers: int) -> tuple[int, ...]:
        return (self.layer,)

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        assert obs is not None
        instruction = obs.instruction & ~tokens.is_vision
        count, norm = self.count(vision), jnp.sum(jnp.abs(obs.k.astype(jnp.float32)), axis=(0, 2))
        pivots, present = self.pivots(norm, vision, instruction, count)
        seeds = jnp.zeros_like(vision).at[pivots].max(present & vision[pivots])
        remaining, number = count - jnp.sum(seeds), jnp.cumsum(present) - 1
        shares = jnp.where(present, remaining // jnp.maximum(jnp.sum(present), 1), 0)
        # The first pivots get one more each, until the remainder is used up.
        shares = shares + (present & (number < remaining % jnp.maximum(jnp.sum(present), 1)))
        unit = matching.unit(tokens.x)

        def take(taken: Mask, pivot: tuple[Array, Array]) -> tuple[Mask, None]:
            index, share = pivot
            cosine = jnp.einsum("th,h->t", unit, unit[index], precision=jax.lax.Precision.HIGHEST)
            return taken | top(-cosine[None], vision & ~taken, share[None])[0], None

        taken, _ = jax.lax.scan(take, seeds, (pivots, shares))
        return taken

    def pivots(self, norm: Array, vision: Mask, instruction: Mask, count: Array) -> tuple[Array, Array]:
        """Indices of the pivots in their order, and which of them exist, since the prompt may have fewer."""

        def largest(mask: Mask, most: int) -> Array:
            return jnp.argsort(jnp.where(mask, -norm, jnp.inf), stable=True)[:most]

        image, text = largest(vision, self.vision_pivots), largest(instruction, self.text_pivots)
        present = vision[image] & (jnp.arange(len(image)) < count), instruction[text]
        return jnp.concatenate([image, text]), jnp.concatenate(present)
