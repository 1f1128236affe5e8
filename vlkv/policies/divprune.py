from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from vlkv.compression import matching
from vlkv.compression.policy import Mask, Observation
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens


class DivPrune(ReducingPolicy):
    """Greedy max-min diversity of the vision embeddings (Alvar et al. 2025, Sec. 3, Alg. 1).

    The distance of two tokens is 1 - cosine. The first token is the one whose nearest neighbour is farthest away, every
    further one that whose distance to the nearest selected token is largest. All images of a row are one set.
    """

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        unit = matching.unit(tokens.x)
        nearest = matching.nearest(tokens.x, vision)

        def add(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            chosen, similar, number = state
            # The first choice is by the nearest of all others, later ones by the nearest chosen token.
            best = jnp.argmin(jnp.where(vision & ~chosen, jnp.where(number == 0, nearest, similar), jnp.inf))
            cosine = jnp.einsum("th,h->t", unit, unit[best], precision=jax.lax.Precision.HIGHEST)
            return chosen.at[best].set(True), jnp.maximum(similar, cosine), number + 1

        count: Int[Array, ""] = self.count(vision)
        start = jnp.zeros_like(vision), jnp.full(vision.shape, -jnp.inf), jnp.zeros_like(count)
        chosen, _, _ = jax.lax.while_loop(lambda state: state[2] < count, add, start)
        return chosen
