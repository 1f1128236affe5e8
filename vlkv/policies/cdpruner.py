from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.compression import matching
from vlkv.compression.observe import Observation, instruction
from vlkv.compression.policy import Mask
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens


class CDPruner(ReducingPolicy):
    """The greedy mode of a determinantal point process that is conditioned on the instruction (Zhang et al. 2025).

    The kernel of two tokens is r_i cos(x_i, x_j) r_j. The next token is the one with the largest conditional variance
    given the selected ones: r_i^2 times the squared distance of its normalised embedding from their span. If the
    selected tokens span all others, a new round begins with these. r is the relevance in [0, 1]: the mean cosine to the
    embeddings of the instruction (in the paper in CLIP's space, whose text tower checkpoints do not have).
    """

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        unit = matching.unit(tokens.x)
        start = unit * self.relevance(tokens, unit)[:, None]
        square = jnp.sum(start**2, axis=1)

        def add(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            # `rest` is what the selected tokens do not span, so its squared length is the conditional variance.
            chosen, rest, number = state
            candidates, variance = vision & ~chosen, jnp.sum(rest**2, axis=1)
            is_open = candidates & (variance > 1e-9 * square)  # more than rounding errors
            ends = ~jnp.any(is_open)
            rest, variance = jnp.where(ends, start, rest), jnp.where(ends, square, variance)
            best = jnp.argmax(jnp.where(candidates & (is_open | ends), variance, -1.0))
            direction = rest[best] / jnp.maximum(jnp.linalg.norm(rest[best]), 1e-12)
            amount = jnp.einsum("td,d->t", rest, direction, precision=jax.lax.Precision.HIGHEST)
            return chosen.at[best].set(True), rest - amount[:, None] * direction, number + 1

        count = self.count(vision)
        chosen, _, _ = jax.lax.while_loop(
            lambda state: state[2] < count, add, (jnp.zeros_like(vision), start, jnp.zeros_like(count))
        )
        return chosen

    def relevance(self, tokens: Tokens, unit: Float[Array, "T D"]) -> Float[Array, " T"]:
        """Mean cosine to the instruction's embeddings, scaled to [0, 1] over the vision tokens; 1 without text."""
        vision, text = tokens.valid & tokens.is_vision, instruction(tokens.is_vision & tokens.valid, tokens.valid)
        mean = jnp.sum(jnp.where(text[:, None], unit, 0.0), axis=0) / jnp.maximum(jnp.sum(text), 1)
        cosine = jnp.einsum("td,d->t", unit, mean, precision=jax.lax.Precision.HIGHEST)
        least = jnp.min(jnp.where(vision, cosine, jnp.inf))
        spread = jnp.max(jnp.where(vision, cosine, -jnp.inf)) - least
        return jnp.where(spread > 0, (cosine - least + 1e-6) / jnp.where(spread > 0, spread, 1.0), 1.0)
