"""H2O: heavy hitters, the tokens that have received most attention so far, and a recent window."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets
from vlkv.memory import Memory, evict
from vlkv.observe import Observation, column_sums, group_mean, last
from vlkv.policies.policy import Policy, policy


@policy
class H2O(Policy):
    """Accumulated attention per head, half of the budget for the most recent tokens (Zhang et al. 2023, Sec. 4.1).

    While decoding every step adds its attention, and what is over the budget of the prompt leaves: the least attended
    entry outside the recent window. Under scope="vision" new tokens are text, so nothing leaves.

    Attributes:
        recent: tokens kept as recent: a whole number of them, or a share of the mean budget of a layer, rounded down
            (A-VL's baseline keeps 0.75); None: half of it.
        evict: whether to go on while decoding; False keeps what prefill has chosen, and all new tokens.
    """

    recent: int | float | None = None
    evict: bool = True
    paper = "Zhang et al. 2023, H2O: Heavy-Hitter Oracle for Efficient Generative Inference"
    equations = "Def. 4.1, Alg. 1"
    stages = "score, step"

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = self.recent is None or (isinstance(self.recent, int) and self.recent >= 0)
        share = isinstance(self.recent, float) and 0 <= self.recent <= 1
        self.check("recent", tokens or share, "must be a whole number of at least 0, a share in [0, 1], or None")

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Column sums of the causal attention, averaged over the query heads of each key head."""
        return group_mean(column_sums(obs), obs.k.shape[0])

    def recent_of(self, budget: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """How many of so many entries are kept as recent."""
        if isinstance(self.recent, int):
            return jnp.full_like(budget, self.recent)
        return budgets.part(0.5 if self.recent is None else self.recent, budget)

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """The recent ones."""
        return last(obs.valid, self.recent_of(obs.mean_budget))

    @property
    def acts(self) -> bool:
        """While tokens of all kinds count."""
        return self.evict and self.scope == "all"

    @property
    def evicts(self) -> bool:
        """If it acts."""
        return self.acts

    def remember(self, obs: Observation, scores: Float[Array, "K T"]) -> dict[str, Float[Array, "K T"]]:
        """Attention accumulated over the prompt."""
        del obs
        return {"mass": scores}

    def step(self, memory: Memory, mass: Float[Array, "N E"]) -> Memory:
        """Adds this step's attention and lets one entry go."""
        heads = memory.stored.shape[0]
        total = memory.values["mass"] + group_mean(mass, heads)
        memory = dataclasses.replace(memory, values={"mass": total})
        count = jnp.sum(memory.stored, axis=-1)
        recent = jnp.minimum(self.recent_of(memory.capacity), memory.capacity)
        old = memory.stored & (memory.rank < (count - recent)[:, None])
        return evict(memory, old & (count > memory.capacity)[:, None], total)
