from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.observe import Observation, each_row, group_mean, pool
from vlkv.compression.option_types import Magnitude, Range
from vlkv.compression.policy import Budgets, Facts, PerLayer, Scores, Statistics
from vlkv.policies.snapkv import SnapKV


class CAKE(SnapKV):
    """Mean and variance of the attention of the last `window` queries (Qin et al. 2025).

    Budgets are proportional to H^(1/tau1) V^(1/tau2): H is the entropy of the attention of the window's rows to the
    candidates, V the variance over these rows, both summed. A token's score is the mean plus `gamma` times the
    variance. The paper evicts in a cascade during prefill, which ends with the same budgets; here `cap` bounds the
    memory.

    Attributes:
        gamma: weight of the variance.
        tau1: temperature of the entropy. The authors publish a pair for each model, from 0.5 to 1.9.
        tau2: temperature of the variance, from 0.4 to 2.3. Other options are those of SnapKV.
    """

    gamma: Magnitude = 200.0
    tau1: Annotated[float, Range(0, above=True)] = 1.0
    tau2: Annotated[float, Range(0, above=True)] = 1.0
    facts = Facts(capped=True)

    def rows_of(self, obs: Observation) -> tuple[Float[Array, "R N T"], Float[Array, "R 1 1"]]:
        """The attention of the window's rows to candidates, and 1 for the rows that exist."""
        window = self.protect(obs)
        attention = each_row(obs, window, self.window)
        present = jnp.arange(len(attention)) < jnp.sum(window)
        return jnp.where(self.candidates(obs), attention, 0.0), present[:, None, None].astype(jnp.float32)

    def score(self, obs: Observation) -> Scores:
        mean, variance = moments(*self.rows_of(obs))
        scores = group_mean(mean + self.gamma * variance, obs.k.shape[0])
        return pool(scores, self.kernel, self.pooling)

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        attention, present = self.rows_of(obs)
        entropy = -jnp.sum(attention * jnp.log(attention + 1e-10))
        spread = jnp.sum(moments(attention, present)[1])
        # The logarithm does not underflow if the variance is tiny.
        preference = jnp.log(jnp.maximum(entropy, 1e-30)) / self.tau1 + jnp.log(jnp.maximum(spread, 1e-30)) / self.tau2
        return {"preference": preference, "window": jnp.sum(obs.in_scope & ~self.candidates(obs))}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        window = jnp.minimum(statistics["window"], total // layers)
        preference = statistics["preference"]
        share = jnp.exp(preference - jnp.max(preference))
        real = window + (total - jnp.sum(window)) * share / jnp.sum(share)
        return budgets.apportion(real, total, floor=jnp.minimum(1, most), ceiling=most)


def moments(
    attention: Float[Array, "R N T"], present: Float[Array, "R 1 1"]
) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
    """Mean and unbiased variance over the rows; one row has the variance 0."""
    count = jnp.maximum(jnp.sum(present), 1)
    mean = jnp.sum(attention, axis=0) / count
    return mean, jnp.sum(present * (attention - mean) ** 2, axis=0) / jnp.maximum(count - 1, 1)
