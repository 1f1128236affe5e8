"""Attention per type of token, and the agreement of two rankings about the most important tokens.

Axes: B batch · S steps · L layers · T prompt · E prompt and new tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression import budgets

TYPES = ("system", "vision", "instruction", "new")


def token_types(
    is_vision: Bool[Array | np.ndarray, "*B T"], valid: Bool[Array | np.ndarray, "*B T"]
) -> Int[Array, "*B T"]:
    """Index into `TYPES` of every prompt token; -1 for padding (A-VL, Fig. 2).

    Text before the first vision token is "system". All other text is "instruction", including all text of a prompt
    without images.
    """
    seen = jnp.cumsum(is_vision & valid, axis=-1)
    before = (seen == 0) & (seen[..., -1:] > 0)
    return jnp.where(~valid, -1, jnp.where(is_vision, 1, jnp.where(before, 0, 2)))


def shares_by_type(mass: Float[Array, "S L B E"], types: Int[Array, "B T"]) -> Float[Array, "S L B 4"]:
    """The share of the attention of each step and layer that each type of token receives (A-VL, Eq. 1 and Fig. 1).

    Args:
        mass: `mass` of a `Trace`.
        types: from `token_types`. Entries after the prompt have the type "new".
    """
    types = jnp.pad(types, [(0, 0), (0, mass.shape[-1] - types.shape[-1])], constant_values=3)
    return jnp.einsum("slbe,bek->slbk", mass, jax.nn.one_hot(types, len(TYPES)))


def concordance(
    a: Float[Array | np.ndarray, "*X T"],
    b: Float[Array | np.ndarray, "*X T"],
    inside: Bool[Array | np.ndarray, "*#X T"],
    fraction: float,
) -> Float[Array, "*X"]:
    """PPCI: the share of the best `fraction` of the tokens that two rankings have in common (A-VL, Eq. 2).

    Fig. 4 compares the layers of one step, Fig. 5 the steps of one layer. The best floor(fraction N) of the N tokens
    `inside` are compared, at least one. Of tokens with equal scores the earlier one ranks higher. NaN if N is 0.

    Args:
        a: scores; higher is better.
        b: scores of the other ranking.
        inside: which tokens are ranked.
        fraction: in (0, 1].
    """
    inside = jnp.asarray(inside)
    tokens = jnp.sum(inside, axis=-1)
    count = jnp.minimum(jnp.maximum(budgets.share(fraction, tokens, a.shape[-1]), 1), tokens)

    def best(x: Array | np.ndarray) -> Array:
        order = jnp.argsort(jnp.where(inside, -x, jnp.inf), axis=-1, stable=True)
        return inside & (jnp.argsort(order, axis=-1) < count[..., None])

    return jnp.sum(best(a) & best(b), axis=-1) / count
