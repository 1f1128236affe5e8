from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.cache.decode_state import DecodeState, evict, evictable
from vlkv.compression.option_types import Count
from vlkv.compression.policy import DecodingStages, Facts, Mask, Observation, Scores
from vlkv.masks import first, ordinal


class StreamingLLM(DecodingStages):
    """Keeps the first `sinks` tokens and the most recent ones (Xiao et al. 2024, Sec. 3.2).

    Keys keep the rotation of their positions in the prompt; the authors rotate by positions in the cache.

    Attributes:
        sinks: number of first tokens that are always kept.
        evict: True: while decoding, a head with more entries than its budget evicts the oldest one that is no sink.
            False, or scope="vision": nothing is evicted while decoding, as in kvpress.
    """

    sinks: Count = 4
    evict: bool = False
    facts = Facts(observes=False)
    idle = property(lambda self: ("smooth",) if self.evict and self.scope == "all" else ("smooth", "step"))

    def score(self, obs: Observation) -> Scores:
        return jnp.broadcast_to(ordinal(obs.valid).astype(jnp.float32), obs.k.shape[:2])

    def protect(self, obs: Observation) -> Mask:
        return first(obs.valid, jnp.minimum(self.sinks, obs.mean_budget))

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        sinks = jnp.minimum(self.sinks, state.budget)
        old = evictable(state, jnp.zeros_like(sinks)) & (state.rank >= sinks[:, None])
        return evict(state, old, state.rank.astype(jnp.float32))
