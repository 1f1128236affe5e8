"""Quality of a ranking of vision tokens: how likely the answer is if the model sees only one of them.

Axes: B batch · R ranks · S answer · L layers · K key heads · T prompt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.analysis.fidelity import log_probability
from vlkv.analysis.trace import follow
from vlkv.cache.pool import PackedCache
from vlkv.families import Model
from vlkv.generation.prompt import Prompt


def one_token_curve(
    params: Model,
    prompt: Prompt,
    cache: PackedCache,
    scores: Float[Array | np.ndarray, "B L K T"],
    answer: Int[Array | np.ndarray, "B S"],
    ranks: Int[Array | np.ndarray, " R"],
) -> Float[Array, "R B"]:
    """Log-probability of an answer if decoding attends to all text and one vision token (AirCache, Figs. 3, 4, 5).

    In each layer and head, this is the vision token with the given rank. The paper plots the accuracy of a benchmark.
    This is the mean log-probability of the answer's tokens after the first, which eviction does not affect.

    Args:
        params: the model.
        prompt: a prompt that was not reduced.
        cache: the full cache of the prompt, with capacity for the answer.
        scores: scores of a policy (see `choose`); higher is better. Of equal scores the earlier token ranks higher.
        answer: padded with -1.
        ranks: ranks to measure; 1 is the best token, as in the paper; 0: no vision token at all.
    """
    vision = (prompt.is_vision & prompt.valid)[:, None]  # [B, 1, T]
    by_layer = jnp.swapaxes(jnp.asarray(scores), 0, 1)
    order = jnp.argsort(jnp.where(vision, -by_layer, jnp.inf), axis=-1, stable=True)
    rank_of = jnp.argsort(order, axis=-1) + 1  # [L, B, K, T]

    def measure(rank: Int[Array, ""]) -> Float[Array, " B"]:
        trace = follow(params, prompt, cache, answer[:, :-1], only=~vision | (rank_of == rank))
        return log_probability(trace.logits, answer)

    return jax.lax.map(measure, jnp.asarray(ranks))
