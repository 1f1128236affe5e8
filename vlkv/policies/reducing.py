"""Base class of methods that reduce the prompt between layers, and evict nothing from the caches."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets
from vlkv.observe import Observation
from vlkv.policies.option_types import Scope
from vlkv.policies.policy import Policy, policy


@policy
class ReducingPolicy(Policy):
    """Every layer caches all of its tokens. `keep` is the fraction of vision tokens left after the last stage."""

    scope: Scope = "vision"
    stages = "reduce"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("scope", self.scope == "vision", 'must be "vision", because text is always kept')
        self.check("budget", self.budget is None, "is not supported here: give keep=, the fraction left at the end")

    @property
    def last_keep(self) -> float:
        """`keep`, which is never None here."""
        assert self.keep is not None
        return self.keep

    def count(self, vision: Bool[Array, " T"]) -> Int[Array, ""]:
        """`keep` times the number of these vision tokens, rounded half up, at least one."""
        return jnp.asarray(budgets.totals(self.keep, None, layers=1, most=vision.shape[0]))[jnp.sum(vision)]

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """`keep` times `vision`, rounded as in `count`."""
        del stage, images
        return int(budgets.totals(self.keep, None, layers=1, most=vision)[-1])

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Equal scores, because nothing is evicted."""
        return jnp.zeros(obs.k.shape[:2])

    def total(self, counts: Int[Array, " L"], seen: Int[Array, ""], *, layers: int, most: int) -> Int[Array, ""]:
        """All tokens of the layers."""
        del seen, layers, most
        return jnp.sum(counts)

    def bound(self, *, layers: int, vision: int, text: int, images: int = 1) -> int:
        """Bounds on the tokens of the layers, summed."""
        return sum(self.vision_bounds(layers=layers, vision=vision, images=images)) + layers * text
