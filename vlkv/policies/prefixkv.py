"""PrefixKV: every layer keeps the same share of its importance, so layers with flat importance keep more tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets
from vlkv.memory import Memory, evict, rank_by_place
from vlkv.observe import Observation, column_sums, first, head_mean, last
from vlkv.policies.policy import Policy, Statistics, policy


@policy
class PrefixKV(Policy):
    """Head-mean column sums, and one threshold on their cumulative sum for all layers (Eq. 1, Alg. 1).

    Importance is normalised per layer and sorted; R_l is the shortest prefix that reaches p, and p is bisected until
    the R_l sum to the budget: on the bits of a float32, hence exact, with what is left given to the layers whose next
    cumulative value is smallest. R_l counts the protected sinks and recent tokens.

    While decoding a layer's share of all tokens seen stays that of the prompt: over ceil(share x seen), the entry at a
    fixed distance from the newest leaves, as in Elastic Cache; where there are no more entries than that, the middle
    one. Under scope="vision" new tokens are text, so nothing leaves.

    Attributes:
        sinks: first tokens that always stay.
        recent: last tokens that always stay.
        distance: the entry that leaves while decoding is the `distance`-th newest; None: nothing leaves.
    """

    sinks: int = 1
    recent: int = 1
    distance: int | None = 25
    paper = "Wang et al. 2024, PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need"
    equations = "Eq. 1, Alg. 1"
    stages = "score, allocate, step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("sinks", self.sinks >= 0, "must not be negative")
        self.check("recent", self.recent >= 0, "must not be negative")
        self.check("distance", self.distance is None or self.distance >= 1, "must be at least 1")

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Head-mean column sums."""
        return head_mean(column_sums(obs), obs.k.shape[0])

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """Sinks and recent tokens."""
        return first(obs.valid, self.sinks) | last(obs.valid, self.recent)

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """`cumulative`: P_l(o) for o = 1..T, importance sorted downwards; +inf past the tokens in scope."""
        importance = jnp.where(obs.in_scope, scores[0], 0.0)
        ordered = -jnp.sort(-importance / jnp.maximum(jnp.sum(importance), 1e-30))
        inside = jnp.arange(ordered.shape[0]) < jnp.sum(obs.in_scope)
        return {"cumulative": jnp.where(inside, jnp.cumsum(ordered), jnp.inf)}

    def allocate(
        self, statistics: Statistics, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, " L"]:
        """R_l: a layer takes its (o + 1)-th token exactly if P_l(o) lies below the common threshold."""
        cumulative = statistics["cumulative"]
        place = jnp.arange(cumulative.shape[1])
        before = jnp.pad(cumulative, [(0, 0), (1, 0)])[:, :-1]
        least = jnp.minimum(self.sinks + self.recent if self.scope == "all" else 1, total // layers)
        gates = jnp.where(place < least, 0.0, jnp.where(place < most[:, None], before, jnp.inf))
        return budgets.smallest(gates, total)

    @property
    def acts(self) -> bool:
        """While tokens of all kinds count."""
        return self.distance is not None and self.scope == "all"

    def step(self, memory: Memory, mass: Float[Array, "N E"]) -> Memory:
        """Lets one entry go if the layer holds more than its share of what has been seen."""
        del mass
        assert self.distance is not None
        prompt = memory.vision + memory.text
        share = -(-(memory.capacity * (prompt + memory.steps)) // jnp.maximum(prompt, 1))
        count = jnp.sum(memory.stored, axis=-1)
        leaving = jnp.where(count > self.distance, count - self.distance, count // 2)
        rank = rank_by_place(memory, memory.stored)
        over = memory.stored & (rank == leaving[:, None]) & (count > share)[:, None]
        return evict(memory, over, rank.astype(jnp.float32))
