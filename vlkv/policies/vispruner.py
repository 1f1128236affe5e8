from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from vlkv.compression import budgets, matching
from vlkv.compression.option_types import Positive, Unit
from vlkv.compression.policy import Mask, Observation
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import top


class VisPruner(ReducingPolicy):
    """Keeps tokens with much class attention; from the rest, duplicates are removed in rounds (Zhang et al. 2025).

    The rest is a list in the order of class attention. In each round, every token at an even place is matched with the
    most similar one at an odd place, and the `each` tokens with the largest cosine are removed. The list of the next
    round has the remaining even tokens, most similar first, and then the odd ones.

    Attributes:
        important: share of the budget for tokens with much attention, rounded down.
        each: number of tokens that a round removes.
    """

    important: Unit = 0.5
    each: Positive = 8
    class_attention_layers = (-1,)  # the last block that runs

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        attention, count = tokens.tower_attention[-1], self.count(vision)
        by_attention = budgets.share(self.important, count, vision.shape[0])
        best = top(attention[None], vision, by_attention[None])[0]
        return best | self.diverse(tokens, vision & ~best, attention, count - by_attention)

    def diverse(self, tokens: Tokens, rest: Mask, attention: Array, count: Array) -> Mask:
        """The `count` tokens of the rest that are left after the rounds."""
        group = jnp.zeros(rest.shape, jnp.int32)  # all tokens are compared

        def ranked(mask: Mask, key: Array, place: Array) -> Array:
            """Place of each token of a mask in the order of a key; equal ones in the order of `place`."""
            order = jnp.lexsort((place, key, ~mask))
            return jnp.zeros_like(place).at[order].set(jnp.arange(len(place), dtype=place.dtype))

        def run_round(state: tuple[Array, Array]) -> tuple[Array, Array]:
            rest, place = state
            even, odd = rest & (place % 2 == 0), rest & (place % 2 == 1)
            _, cosine = matching.closest(tokens.x, odd, group)
            order = ranked(even, -cosine, place)
            removed = jnp.minimum(jnp.minimum(self.each, jnp.sum(rest) - count), jnp.sum(even))
            odd_place = jnp.sum(even) - removed + place // 2  # after the remaining even ones
            return rest & ~(even & (order < removed)), jnp.where(even, order - removed, odd_place)

        first = ranked(rest, -attention, jnp.arange(len(rest), dtype=jnp.int32))
        remaining, _ = jax.lax.while_loop(lambda state: jnp.sum(state[0]) > count, run_round, (rest, first))
        return remaining
