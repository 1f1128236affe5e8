from __future__ import annotations

import jax
import jax.numpy as jnp

from vlkv.compression.observe import Observation
from vlkv.compression.option_types import Positive
from vlkv.compression.policy import Scores
from vlkv.masks import ordinal
from vlkv.policies.snapkv import SnapKV


class ChunkKV(SnapKV):
    """SnapKV's attention, averaged over chunks of the prompt that are kept or evicted as a whole (Liu et al. 2025).

    All heads of a layer keep the same chunks. The last chunk that is kept may be cut, so that the budget is exact.

    Attributes:
        chunk: number of tokens of a chunk. The chunks begin with the first token that can be evicted.
        kernel: width of SnapKV's smoothing before chunks are averaged; 1: none. Other options are those of SnapKV.
    """

    chunk: Positive = 10
    kernel: Positive = 1

    def score(self, obs: Observation) -> Scores:
        among, scores = self.candidates(obs), jnp.sum(super().score(obs), axis=0)
        number = jnp.where(among, ordinal(among) // self.chunk, len(among))
        sums, counts = (jax.ops.segment_sum(x, number, len(among) + 1) for x in (scores, jnp.ones_like(scores)))
        return jnp.broadcast_to((sums / jnp.maximum(counts, 1))[number], obs.k.shape[:2])
