from __future__ import annotations

import jax.numpy as jnp

from vlkv.compression import budgets
from vlkv.compression.observe import Observation, not_negative
from vlkv.compression.option_types import Magnitude, Unit
from vlkv.compression.policy import Mask, PerHead, Scores, Statistics
from vlkv.masks import top
from vlkv.policies.snapkv import SnapKV


class CriticalKV(SnapKV):
    """SnapKV's scores; the second half of the budget bounds the change of the layer's output (Feng et al. 2025).

    Dropping an entry changes the output by at most its attention times |W_o v|_1, if the tokens with the most attention
    are kept. So a share of the budget is for them, and the rest is for the largest products.

    Attributes:
        first_share: share of the budget besides the window that is for the most attended tokens, rounded down.
        epsilon: added to the mean attention of a row before it is multiplied by the norm. Other options are SnapKV's.
    """

    first_share: Unit = 0.5
    epsilon: Magnitude = 1e-4
    uses = ("output_norm",)
    idle = property(lambda self: ("rank",) if self.first_share == 1 else ())

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        del scores
        assert obs.context is not None and obs.context.output_norm is not None
        return {"norm": obs.context.output_norm, "epsilon": jnp.asarray(self.epsilon * self.rows(obs.mean_budget))}

    def rank(self, scores: Scores, statistics: Statistics, candidates: Mask, count: PerHead) -> tuple[Scores, PerHead]:
        scores = not_negative(scores, candidates)
        best = top(scores, candidates, budgets.unbounded_share(self.first_share, count))
        return jnp.where(best, jnp.inf, (scores + statistics["epsilon"]) * statistics["norm"]), count
