from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from vlkv.compression import budgets
from vlkv.compression.option_types import Odd, Pooling, Unit
from vlkv.compression.policy import Budgets, Facts, Observation, PerLayer, Scores, Statistics
from vlkv.policies.snapkv import SnapKV


class AdaKV(SnapKV):
    """SnapKV's scores, ranked over all heads of a layer together (Feng et al. 2024, Alg. 1).

    Layers have equal budgets. A head whose attention is spread over many tokens gets more entries than one with peaks.

    Attributes:
        safeguard: share of the budget that is divided equally among the heads. Other options are those of SnapKV.
    """

    kernel: Odd = 7
    pooling: Pooling = "max"
    safeguard: Unit = 0.2
    facts = Facts(budgets="heads")
    idle = property(lambda self: ("allocate",) if self.safeguard == 1 else ())

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        return {"ranked": budgets.ranked(scores, self.candidates(obs))}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        def of_layer(ranked, mean, most):  # [K, T + 1], [], []
            heads = len(ranked)
            # Every head keeps the tokens in scope that are not ranked, which are those of the observation window.
            window = jnp.minimum(most - jnp.sum(ranked[0] > -jnp.inf), mean)
            always, most = jnp.full(heads, window), jnp.full(heads, most)
            return budgets.by_order(ranked, heads * mean, always=always, most=most, safeguard=self.safeguard)

        return jax.vmap(of_layer)(statistics["ranked"], budgets.uniform(total, most), most)
