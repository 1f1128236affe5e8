from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets, merging
from vlkv.compression.observe import Measure, Observation, column_sums, columns, group_mean, prefer_text
from vlkv.compression.policy import Budgets, Entries, Kept, Mask, PerHead, PerLayer, Policy, Scores, Statistics
from vlkv.masks import last, tokens_of
from vlkv.sharding.ops import attention_mass


class MEDA(Policy):
    """Budgets by cross-modal attention entropy, LOOK-M's text prior, and mean merging (Wan et al. 2025).

    A layer's entropy is that of the attention of text to vision tokens plus that of vision to text tokens, each with a
    softmax over the other modality only and without a causal mask. Budgets are proportional to the softmax of the
    entropies over the layers. Half of a layer's budget is for its recent tokens. A dropped entry is merged into the
    kept entry whose key has the largest cosine, which becomes the mean of all.

    Attributes:
        entropy: "cross-modal", or "all": that of the whole causal attention, as in the published code.
    """

    entropy: Literal["cross-modal", "all"] = "cross-modal"
    one_scale = False
    idle = property(lambda self: ("rank",) if self.scope == "vision" else ())

    def measures(self, obs: Observation) -> dict[str, Measure]:
        return (columns("sum", "entropy") if self.entropy == "all" else columns("sum"))(self, obs)

    def score(self, obs: Observation) -> Scores:
        return prefer_text(obs, group_mean(column_sums(obs), obs.k.shape[0]))

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        del scores
        if self.entropy == "all":
            total = jnp.sum(column_sums(obs, statistic="entropy"), axis=1)
            return {"entropy": jnp.mean(total) / jnp.maximum(jnp.sum(obs.valid), 1)}
        text, vision = (obs.valid & ~obs.is_vision, obs.max_text), (obs.is_vision, obs.max_vision)
        return {"entropy": mean_entropy(obs, text, vision) + mean_entropy(obs, vision, text)}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        share = jax.nn.softmax(statistics["entropy"])
        floor = jnp.minimum(jnp.maximum(1, most // 100), total // layers)
        return budgets.apportion(total * share, total, floor=floor, ceiling=most)

    def rank(self, scores: Scores, statistics: Statistics, candidates: Mask, count: PerHead) -> tuple[Scores, PerHead]:
        """Half of the budget, rounded down, for recent tokens with scope="all"; the rest by score."""
        del statistics
        if self.scope == "vision":
            return scores, count
        recent = jax.vmap(last, (None, 0))(candidates, count // 2)
        return jnp.where(recent, jnp.inf, scores), count

    def merge(self, k: Entries, v: Entries, kept: Kept, scores: Scores) -> tuple[Entries, Entries]:
        target, _ = merging.nearest_key(k, kept)
        gone = merging.dropped(kept, scores)
        return merging.fold(k, k, target, gone), merging.fold(v, v, target, gone)


def mean_entropy(obs: Observation, rows: tuple[Mask, int | None], keys: tuple[Mask, int | None]) -> Float[Array, ""]:
    """Entropy of the attention of `rows` to `keys`, without a causal mask, averaged over rows and heads.

    Each argument is a mask and a static bound on its tokens, or None. These tokens are gathered, so that attention of
    the others is not computed.
    """
    if 0 in (rows[1], keys[1]):
        return jnp.zeros(())
    row, key = tokens_of(*rows), tokens_of(*keys)
    weight = (row >= 0) / jnp.maximum(jnp.sum(rows[0]), 1)
    entropy = attention_mass(
        obs.q[:, row], obs.k[:, key], row_weight=weight[None], key_mask=key >= 0, causal=False, statistic="entropy",
        implementation=obs.kernels.attention_mass,
    )  # fmt: skip
    return jnp.mean(jnp.sum(entropy[0], axis=1))
