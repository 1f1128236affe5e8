from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vlkv.compression.observe import Observation, group_mean, not_negative, pool, rows_mass
from vlkv.compression.option_types import Count, Magnitude, Odd
from vlkv.compression.policy import Mask, PerHead, Scores, Statistics
from vlkv.masks import last, top
from vlkv.policies.snapkv import SnapKV


class BACON(SnapKV):
    """SnapKV's scores, calibrated by the attention of the last query (Chen et al. 2026).

    The mean over the window dilutes tokens that only the last query needs. The evidence E of a token is the attention
    of the last query beyond that mean. The calibration V is the sum of E, its mean over neighbouring tokens and its
    mean over the layers before. The ranking is B + lambda V, with the window's scores B and

        lambda = strength * std(B) / std(V) * min(mean(V) / mean(B), 1)

    where means and deviations are those of the largest 2n values, and n is the budget besides the window.

    Attributes:
        neighbours: width of the mean over tokens, odd.
        earlier: number of layers before, whose mean is taken.
        strength: of the calibration. Other options are those of SnapKV.
    """

    neighbours: Odd = 5
    earlier: Count = 4
    strength: Magnitude = 0.5
    ranked_by = ("scores", "evidence")
    needs = ("same tokens",)
    idle = property(lambda self: ("rank",) if self.strength == 0 else ())

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        """`evidence` of each token: like the scores, it is multiplied by the number of rows in the window."""
        mass = group_mean(rows_mass(obs, last(obs.valid, 1), 1), obs.k.shape[0])
        candidates = self.candidates(obs)
        attention = pool(jnp.where(candidates, mass, 0.0), self.kernel, self.pooling)
        beyond = jnp.sum(self.protect(obs)) * attention - scores
        return {"evidence": jnp.where(candidates, jnp.maximum(beyond, 0.0), 0.0)}

    def across(self, statistics: Statistics) -> Statistics:
        """Adds `earlier`: the mean evidence of the layers before, 0 in the first layer."""
        evidence = statistics["evidence"]
        before = np.tri(len(evidence), k=-1) - np.tri(len(evidence), k=-1 - self.earlier)
        mean = before / np.maximum(before.sum(axis=1, keepdims=True), 1)
        earlier = jnp.einsum("lm,mkt->lkt", mean, evidence, precision=jax.lax.Precision.HIGHEST)
        return statistics | {"earlier": earlier.astype(evidence.dtype)}

    def rank(self, scores: Scores, statistics: Statistics, candidates: Mask, count: PerHead) -> tuple[Scores, PerHead]:
        evidence = statistics["evidence"]
        calibration = evidence + pool(evidence, self.neighbours, "avg") + statistics["earlier"]

        def of_best(x: Float[Array, "K T"]) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
            """Mean and standard deviation of the 2n largest values."""
            best = top(x, candidates, 2 * count)
            number = jnp.maximum(jnp.sum(best, axis=1), 1)
            mean = jnp.sum(x, axis=1, where=best) / number
            return mean, jnp.sqrt(jnp.sum((x - mean[:, None]) ** 2, axis=1, where=best) / number)

        scores = not_negative(scores, candidates)
        (mean_b, std_b), (mean_v, std_v) = of_best(scores), of_best(calibration)
        presence = jnp.clip(mean_v / (mean_b + 1e-8), 0.0, 1.0)
        weight = self.strength * std_b / (std_v + 1e-8) * presence
        return scores + weight[:, None] * calibration, count
