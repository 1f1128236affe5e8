"""AdaKV: the heads of a layer share its budget according to their scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv import budgets
from vlkv.observe import Observation, top
from vlkv.policies.option_types import Pooling, Unit
from vlkv.policies.policy import Statistics, policy
from vlkv.policies.snapkv import SnapKV


@policy
class AdaKV(SnapKV):
    """SnapKV's scores, ranked over all heads of a layer together (Feng et al. 2024, Alg. 1).

    Layers have equal budgets. A head whose attention is spread over many tokens has more of the layer's best scores
    than a head with a few peaks, so it gets more entries. The cache allocates the sum over all heads.

    Attributes:
        window: as in SnapKV; every head keeps it with scope="all".
        kernel: as in SnapKV.
        pooling: as in SnapKV.
        safeguard: share of the budget that is divided equally among the heads.
    """

    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"
    safeguard: Unit = 0.2
    paper = "Feng et al. 2024, Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation"
    equations = "Alg. 1"
    per_head = True
    stages = "score, allocate"

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """The scores of every head in decreasing order, and the length of the window."""
        candidates = obs.in_scope & ~self.protect(obs) if self.scope == "all" else obs.in_scope
        ranked = -jnp.sort(-jnp.where(candidates, scores, -jnp.inf), axis=-1)
        return {"ranked": ranked, "candidates": jnp.sum(candidates)}

    def allocate(
        self, statistics: Statistics, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, "L K"]:
        """The number of each head's tokens among the best of its layer, and an equal share of the safeguard."""

        def share(ranked, candidates, mean, most):  # [K, T], [], [], []
            heads, length = ranked.shape
            window = jnp.minimum(most - candidates, mean)  # every head keeps it
            among = jnp.tile(jnp.arange(length) < candidates, heads)
            best = top(ranked.reshape(1, -1), among, heads * (mean - window)[None]).reshape(ranked.shape)
            own = (1 - self.safeguard) * jnp.sum(best, axis=-1) + self.safeguard * (mean - window)
            return budgets.apportion(window + own, heads * mean, floor=jnp.minimum(1, most), ceiling=most)

        means = budgets.uniform(total, most)
        return jax.vmap(share)(statistics["ranked"], statistics["candidates"], means, most)
