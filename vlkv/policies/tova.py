from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.cache.decode_state import DecodeState, evict, evictable, mean_over_heads
from vlkv.compression.observe import Observation, group_mean, head_mean, rows_mass
from vlkv.compression.option_types import Count
from vlkv.compression.policy import DecodingStages, Mask, Scores
from vlkv.masks import last


class TOVA(DecodingStages):
    """Attention of the newest token, averaged over all heads of a layer (Oren et al. 2024, Sec. 3.2).

    While decoding, each step evicts the entry to which its token attends least. With scope="vision" nothing is evicted,
    because new tokens are text. In a composition heads may hold different tokens. Then the attention to a token is 0 in
    heads that do not hold it, and each head evicts an entry of its own.

    Attributes:
        recent: number of recent tokens that are kept whatever their attention; 0 in the paper, 1 in kvpress.
        evict: False: nothing is evicted while decoding, as in kvpress.
    """

    recent: Count = 0
    evict: bool = True
    newest = 1
    idle = property(lambda self: () if self.evict and self.scope == "all" else ("step",))

    def score(self, obs: Observation) -> Scores:
        return head_mean(rows_mass(obs, last(obs.valid, 1), 1), obs.k.shape[0])

    def protect(self, obs: Observation) -> Mask:
        return last(obs.valid, self.recent)

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        recent, heads = jnp.full_like(state.budget, self.recent), state.stored.shape[0]
        return evict(state, evictable(state, recent), mean_over_heads(state, group_mean(mass, heads)))
