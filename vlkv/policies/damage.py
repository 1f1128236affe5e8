from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.observe import Observation, each_row, group_mean, pool
from vlkv.compression.option_types import Odd, Unit
from vlkv.compression.policy import Budgets, Entries, Facts, PerLayer, Scores, Statistics
from vlkv.policies.adakv import AdaKV


class Damage(AdaKV):
    """Scores are how much evicting an entry changes the attention output. All layers and heads are ranked together.

    Without an entry of attention a and value v, the output o of a row changes by a / (1 - a) |v - o|. The score is the
    mean of this change over the last `window` rows and over the query heads of a key head, relative to |o|. The change
    is exact for one entry; those of several entries do not add up.

    Attributes:
        safeguard: share of the budget that is divided equally among all heads.
        relative: whether the change is divided by the norm of the output. Other options are those of SnapKV.
    """

    kernel: Odd = 1
    safeguard: Unit = 0.0
    relative: bool = True
    facts = Facts(budgets="heads")

    def score(self, obs: Observation) -> Scores:
        kv_heads, rows = obs.k.shape[0], self.protect(obs)
        damage = damages(each_row(obs, rows, self.window), obs.v, relative=self.relative)
        mean = group_mean(jnp.sum(damage, axis=0) / jnp.maximum(jnp.sum(rows), 1), kv_heads)
        return pool(jnp.where(self.candidates(obs), mean, 0.0), self.kernel, self.pooling)

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        return budgets.by_order_of_all_layers(statistics["ranked"], total, most, safeguard=self.safeguard)


def damages(attention: Float[Array, "R N T"], v: Entries, *, relative: bool) -> Float[Array, "R N T"]:
    """The change of each row's output without one of its entries."""
    rows, heads, length = attention.shape
    value = v.astype(jnp.float32)
    a = attention.reshape(rows, len(v), -1, length)  # [R, K, G, T]

    def output(a: Float[Array, "R K G T"]) -> Float[Array, "R K G H"]:
        return jnp.einsum("rkgt,kth->rkgh", a, value, precision=jax.lax.Precision.HIGHEST)

    def norm(x: Float[Array, "*n H"]) -> Float[Array, "*n"]:
        return jnp.linalg.norm(x, axis=-1)

    out = output(a)
    product = jnp.einsum("rkgh,kth->rkgt", out, value, precision=jax.lax.Precision.HIGHEST)
    distance = norm(value)[:, None] ** 2 + norm(out)[..., None] ** 2 - 2 * product
    # The most attended entry may have all attention, where the formula has no digits left: compute its change directly.
    is_first = jnp.arange(length) == jnp.argmax(a, axis=-1, keepdims=True)
    others = jnp.where(is_first, 0.0, a)
    without = output(others) / jnp.maximum(jnp.sum(others, axis=-1, keepdims=True), 1e-30)
    change = others / (1 - others) * jnp.sqrt(jnp.maximum(distance, 0.0))
    change = jnp.where(is_first, norm(without - out)[..., None], change)
    change = change / jnp.maximum(norm(out)[..., None], 1e-30) if relative else change
    return change.reshape(rows, heads, length)
