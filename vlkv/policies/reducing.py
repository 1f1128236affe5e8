"""What methods share that shorten the prompt on its way through the layers, and evict nothing afterwards."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets
from vlkv.observe import Observation
from vlkv.policies.policy import Policy, Scope, policy


@policy
class ReducingPolicy(Policy):
    """Layers cache what reaches them. `keep` is the fraction of the vision tokens that survives the last stage."""

    scope: Scope = "vision"
    stages = "reduce"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("scope", self.scope == "vision", 'must be "vision": text always stays')
        self.check("budget", self.budget is None, "is not understood here: give keep=, what survives the last stage")

    @property
    def last_keep(self) -> float:
        """`keep`, which the constructor has checked."""
        assert self.keep is not None
        return self.keep

    def count(self, vision: Bool[Array, " T"]) -> Int[Array, ""]:
        """How many of these vision tokens survive where one stage does it all: rounded half up, at least one."""
        return self.survivors(vision.shape[0])[jnp.sum(vision)]

    def survivors(self, most: int) -> Int[Array, " counts"]:
        """The same for every number 0..most of vision tokens."""
        return jnp.asarray(budgets.totals(self.keep, None, layers=1, most=most))

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """As `survivors` says."""
        del stage, images
        return int(budgets.totals(self.keep, None, layers=1, most=vision)[-1])

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """All alike: nothing that is left is evicted."""
        return jnp.zeros(obs.k.shape[:2])

    def total(self, counts: Int[Array, " L"], seen: Int[Array, ""], *, layers: int, most: int) -> Int[Array, ""]:
        """Everything that is left."""
        del seen, layers, most
        return jnp.sum(counts)

    def bound(self, *, layers: int, vision: int, text: int, images: int = 1) -> int:
        """What the layers can hold."""
        return sum(self.vision_bounds(layers=layers, vision=vision, images=images)) + layers * text
