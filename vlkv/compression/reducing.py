"""Base classes of methods that reduce the prompt before or between layers, and evict nothing from the cache.

The least that such a method defines is `choose`, the vision tokens that are kept. It overrides `reductions` to choose
them after some layers, and `reduce` to merge tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression import budgets
from vlkv.compression.option_types import Positive, Scope
from vlkv.compression.policy import Facts, Mask, Observation, ReducingStages, fills
from vlkv.compression.tokens import Tokens
from vlkv.masks import top


class ReducingPolicy(ReducingStages):
    """Reduces the prompt; every layer then caches all tokens that it has processed.

    `keep` is the fraction of vision tokens that are left after the last stage, and text is always kept.
    """

    scope: Scope = "vision"
    facts = Facts(stages="reduce", selects=False, observes=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("scope", self.scope == "vision", 'must be "vision", because text is always kept')
        self.check("budget", self.budget is None, "is not supported here: give keep=, the fraction left at the end")

    @property
    def last_keep(self) -> float:
        """`keep`, for type checkers: `__post_init__` refuses `budget`, so it is not None."""
        assert self.keep is not None
        return self.keep

    def reductions(self, layers: int) -> tuple[int, ...]:
        """One reduction before the first layer."""
        return (0,)

    def count(self, vision: Bool[Array, " T"], share: float | None = None) -> Int[Array, ""]:
        """`share` (None: `keep`) times the number of tokens in the mask, rounded half up, at least one."""
        share = self.keep if share is None else share
        return jnp.asarray(budgets.fraction(share, vision.shape[0]))[jnp.sum(vision)]

    def best(self, score: Float[Array, " T"], vision: Mask, share: float | None = None) -> Mask:
        """The `count` vision tokens with the highest scores."""
        return top(score[None], vision, self.count(vision, share)[None])[0]

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        """Keeps text and the vision tokens of `choose`, and changes no hidden states."""
        vision = tokens.valid & tokens.is_vision
        return tokens, (tokens.valid & ~tokens.is_vision) | self.choose(tokens, obs, vision)

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        """The vision tokens that are kept; `obs` is the layer that has just run, None before the first."""
        raise NotImplementedError

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """`keep` times `vision`, rounded as in `count`."""
        return int(budgets.fraction(self.keep, vision)[-1])

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Equal scores, because nothing is evicted."""
        return jnp.zeros(obs.k.shape[:2])

    def total(self, sums: Int[np.ndarray, " sums"], *, layers: int, text: int) -> Int[np.ndarray, " sums"]:
        """All tokens of the layers, because nothing is evicted.

        With options that switch the reduction off, the method works on the cache, where `keep` is the usual budget.
        """
        return sums if fills(self, "reduce") else budgets.total(self.keep, self.budget, sums, layers=layers)


class StagedPolicy(ReducingPolicy):
    """Reduces the prompt in several stages, each of which keeps the same share of its vision tokens.

    Attributes:
        layers: how many layers run before each stage; None: the three numbers of `after`.
    """

    layers: tuple[Positive, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("layers", self.layers != (), "must have at least one number")

    def after(self, layers: int) -> tuple[int, ...]:
        """The default of the option `layers`, for a model with `layers` layers."""
        raise NotImplementedError

    @property
    def stage_count(self) -> int:
        """The number of stages."""
        return 3 if self.layers is None else len(self.layers)

    def reductions(self, layers: int) -> tuple[int, ...]:
        """The option `layers`, or its default."""
        return self.after(layers) if self.layers is None else self.layers

    @property
    def share(self) -> float:
        """The fraction of its vision tokens that each stage keeps, so that `keep` is left after the last one."""
        return self.last_keep ** (1 / self.stage_count)

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """`share` times `vision`, rounded half up."""
        return int(budgets.fraction(self.share, vision)[-1])
