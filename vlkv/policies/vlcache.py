"""VL-Cache: layers whose attention is dense get more entries, and the text after the image says which."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets
from vlkv.observe import Observation, group_mean, last, ordinal, rows_mass
from vlkv.policies.policy import Policy, Statistics, policy


@policy
class VLCache(Policy):
    """Budgets by sparsity and scores by post-vision attention (Tu et al. 2024).

    Rows are those of the text after the image. An entry counts when it reaches `threshold` of its row's maximum;
    sparsity is 1 - counted / causal entries, mean over heads. Budgets are proportional to 1 - sparsity,
    within [0.01, 1] of the tokens. Score: column sums over those rows, averaged over a key head's group (the sum
    ranks alike). Of the n_l tokens that a layer is granted, max(1, 0.1 n_l) are the most recent; under
    scope="vision", where text stays anyway, none are.

    The authors published no code. A re-implementation neither shares out again what the clip frees nor counts the
    window in n_l; here totals are exact. Without text after the image the last token observes.

    Attributes:
        threshold: share of a row's maximum from which an entry counts.
        window: share of a layer's tokens that are its most recent.
    """

    threshold: float = 0.01
    window: float = 0.1
    paper = "Tu et al. 2024, VL-Cache: Sparsity and Modality-Aware KV Cache Compression for Vision-Language Models"
    stages = "score, allocate, rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("threshold", 0 < self.threshold <= 1, "must lie in (0, 1]")
        self.check("window", 0 <= self.window <= 1, "must lie in [0, 1]")

    def observers(self, obs: Observation) -> Bool[Array, " T"]:
        """The post-vision rows."""
        return jnp.where(jnp.any(obs.instruction), last(obs.instruction, most_rows(obs)), last(obs.valid, 1))

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Attention from the post-vision rows."""
        return group_mean(rows_mass(obs, self.observers(obs), most_rows(obs)), obs.k.shape[0])

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """`sparsity` of the post-vision rows."""
        rows = self.observers(obs)
        counted = rows_mass(obs, rows, most_rows(obs), statistic="count", threshold=self.threshold)
        entries = jnp.sum(jnp.where(rows, ordinal(obs.valid) + 1, 0))
        return {"sparsity": 1 - jnp.sum(jnp.mean(counted, axis=0)) / jnp.maximum(entries, 1)}

    def allocate(
        self, statistics: Statistics, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, " L"]:
        """In proportion to 1 - sparsity, never below a hundredth of the tokens unless the whole budget is."""
        density = 1 - statistics["sparsity"]
        floor = jnp.minimum(jnp.maximum(most // 100, 1), total // layers)
        real = density / jnp.maximum(jnp.sum(density), 1e-30) * total
        return budgets.apportion(real, total, floor=floor, ceiling=most)

    def rank(
        self,
        scores: Float[Array, "K T"],
        statistics: Statistics,
        candidates: Bool[Array, " T"],
        count: Int[Array, " K"],
    ) -> tuple[Float[Array, "K T"], Int[Array, " K"]]:
        """The most recent tenth of what was granted, then by score."""
        del statistics
        if self.scope == "vision":
            return scores, count
        window = jnp.maximum(1, budgets.share(self.window, count, scores.shape[1]))
        recent = jax.vmap(lambda n: last(candidates, n))(window)
        return jnp.where(recent, jnp.inf, scores), count


def most_rows(obs: Observation) -> int:
    """Bound on the observing rows."""
    return max(1, obs.max_instruction)
