"""VL-Cache: layers whose attention is dense get more entries, and the text after the image says which."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
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

    The authors published no code. Totals are exact here. Without text after the image the last token observes. Two
    re-implementations by others neither share out again what the clip frees, so that they keep another number than
    asked, nor count the window in n_l. "shared_window" gives every layer the last 0.1 keep T tokens, and 0.9 of its
    budget besides; "per_layer_window" puts 0.1 n_l on top of the whole budget.

    Attributes:
        threshold: share of a row's maximum from which an entry counts.
        window: share of a layer's tokens that are its most recent.
        variant: "paper", or one of the re-implementations, which ask for `keep` and count all tokens; the pool is as
            much larger as they may overshoot.
    """

    threshold: float = 0.01
    window: float = 0.1
    variant: Literal["paper", "shared_window", "per_layer_window"] = "paper"
    paper = "Tu et al. 2024, VL-Cache: Sparsity and Modality-Aware KV Cache Compression for Vision-Language Models"
    capped = True
    stages = "score, allocate, rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("threshold", 0 < self.threshold <= 1, "must lie in (0, 1]")
        self.check("window", 0 <= self.window <= 1, "must lie in [0, 1]")
        variants = ("paper", "shared_window", "per_layer_window")
        self.check("variant", self.variant in variants, f"is none of {', '.join(variants)}")
        plain = self.keep is not None and self.scope == "all" and self.cap is None
        self.check("variant", self.variant == "paper" or plain, 'needs keep=, scope="all" and no cap')

    def observers(self, obs: Observation) -> Bool[Array, " T"]:
        """The post-vision rows."""
        return jnp.where(jnp.any(obs.instruction), last(obs.instruction, most_rows(obs)), last(obs.valid, 1))

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Attention from the post-vision rows."""
        return group_mean(rows_mass(obs, self.observers(obs), most_rows(obs)), obs.k.shape[0])

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """`sparsity` of the post-vision rows; for a re-implementation also its `window`, or those of 0..T picked."""
        rows = self.observers(obs)
        counted = rows_mass(obs, rows, most_rows(obs), statistic="count", threshold=self.threshold)
        entries = jnp.sum(jnp.where(rows, ordinal(obs.valid) + 1, 0))
        found = {"sparsity": 1 - jnp.sum(jnp.mean(counted, axis=0)) / jnp.maximum(entries, 1)}
        length = obs.valid.shape[0]
        if self.variant == "shared_window":
            found["window"] = jnp.asarray(self.shared_windows(length))[jnp.sum(obs.in_scope)]
        if self.variant == "per_layer_window":
            found["windows"] = jnp.maximum(1, budgets.share(self.window, jnp.arange(length + 1), length))
        return found

    def allocate(
        self, statistics: Statistics, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, " L"]:
        """In proportion to 1 - sparsity, never below a hundredth of the tokens unless the whole budget is."""
        density = 1 - statistics["sparsity"]
        if self.variant != "paper":
            picked = jnp.maximum(1, jnp.floor(self.fractions(density) * most).astype(jnp.int32))
            if self.variant == "shared_window":
                return jnp.minimum(picked + statistics["window"], most)
            return jnp.minimum(picked + jax.vmap(jnp.take)(statistics["windows"], picked), most)
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
        if self.scope == "vision":
            return scores, count
        if self.variant == "shared_window":
            window = jnp.broadcast_to(statistics["window"], count.shape)
        elif self.variant == "per_layer_window":
            sizes = jnp.arange(len(statistics["windows"])) + statistics["windows"]
            window = count - jnp.searchsorted(sizes, count)
        else:
            window = jnp.maximum(1, budgets.share(self.window, count, scores.shape[1]))
        recent = jax.vmap(lambda n: last(candidates, n))(window)
        return jnp.where(recent, jnp.inf, scores), count

    def fractions(self, density: Float[Array, " L"]) -> Float[Array, " L"]:
        """The re-implementations' shares of the tokens, clipped; those of "shared_window" leave room for the window."""
        room = 1 - self.window if self.variant == "shared_window" else 1.0
        share = density / jnp.maximum(jnp.sum(density), 1e-30) * room * self.asked * density.shape[0]
        return jnp.clip(share, 0.01 * room, 1.0)

    @property
    def asked(self) -> float:
        """`keep`, which the constructor has checked."""
        assert self.keep is not None
        return self.keep

    def shared_windows(self, most: int) -> Int[np.ndarray, " counts"]:
        """The window of "shared_window" for every number 0..most of tokens."""
        return np.maximum(1, np.arange(most + 1) * self.asked * self.window).astype(np.int32)

    def largest(self, *, layers: int, most: int) -> Int[np.ndarray, " counts"]:
        """The most that a re-implementation keeps of 0..most tokens: all but the densest layers at the clip."""
        count = layers * np.arange(most + 1)
        picked = (self.asked + 0.01 * (1 - self.asked)) * count + layers
        if self.variant == "shared_window":
            kept = (1 - self.window) * picked + layers * self.shared_windows(most) + layers
        else:
            kept = (1 + self.window) * picked + layers
        return np.minimum(count, np.ceil(kept)).astype(np.int32)

    def total(self, counts: Int[Array, " L"], seen: Int[Array, ""], *, layers: int, most: int) -> Int[Array, ""]:
        """The budget, or room for what a re-implementation makes of it."""
        if self.variant == "paper":
            return super().total(counts, seen, layers=layers, most=most)
        return jnp.asarray(self.largest(layers=layers, most=most))[counts[0]]

    def bound(self, *, layers: int, vision: int, text: int, images: int = 1) -> int:
        """As `total`."""
        if self.variant == "paper":
            return super().bound(layers=layers, vision=vision, text=text, images=images)
        return int(self.largest(layers=layers, most=vision + text)[-1])


def most_rows(obs: Observation) -> int:
    """Bound on the observing rows."""
    return max(1, obs.max_instruction)
