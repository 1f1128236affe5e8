from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression import budgets, merging
from vlkv.compression.observe import Observation, head_mean, rows_mass
from vlkv.compression.option_types import Positive
from vlkv.compression.policy import Mask
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import last, top


class IVTP(ReducingPolicy):
    """Keeps the vision tokens that the instruction attends to, after grouping similar ones (Huang et al. 2024).

    No code was published, and we had only summaries of the paper, so details are ours. Groups: the tokens with the
    largest class attention are kept, every other token joins the most similar of them, and a group becomes its mean.
    Instruction: the attention of the rows after the last vision token in the last layer that ran (the paper uses
    rollout over several).

    Attributes:
        layers: how many layers run before each stage in which tokens are pruned. Each stage keeps the same fraction,
            rounded half up and at least one token, so that `keep` is left after the last one.
        groups: fraction of the vision tokens that are left after grouping, at least `keep`; None: no grouping.
    """

    layers: tuple[Positive, ...] = (2,)
    groups: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("layers", len(self.layers) > 0, "must have at least one number")
        valid = self.groups is None or self.last_keep <= self.groups <= 1
        self.check("groups", valid, "must lie between keep and 1, or be None")

    def reductions(self, layers: int) -> tuple[int, ...]:
        return self.layers if self.groups is None else (0, *self.layers)

    @property
    def class_attention_layers(self) -> tuple[int, ...]:
        return () if self.groups is None else (-1,)

    def fraction(self, stage: int) -> float:
        """The fraction of its vision tokens that a stage keeps. With `groups`, stage 0 is the grouping."""
        after_grouping = 1.0 if self.groups is None else self.groups
        if self.groups is not None and stage == 0:
            return after_grouping
        return (self.last_keep / after_grouping) ** (1 / len(self.layers))

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        return int(budgets.fraction(self.fraction(stage), vision)[-1])

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        vision = tokens.valid & tokens.is_vision
        table = budgets.fraction(self.fraction(stage), vision.shape[0])
        count: Int[Array, " 1"] = jnp.asarray(table)[jnp.sum(vision)][None]
        if obs is None:
            best = top(tokens.tower_attention[-1:], vision, count)
            tokens = grouped(tokens, best, vision[None] & ~best)
        else:
            best = top(self.ranking(obs), vision, count)
        return tokens, (tokens.valid & ~tokens.is_vision) | best[0]

    def ranking(self, obs: Observation) -> Float[Array, "1 T"]:
        rows = jnp.where(jnp.any(obs.instruction), obs.instruction, last(obs.valid, 1))
        return head_mean(rows_mass(obs, rows, max(1, obs.max_instruction)), 1)


def grouped(tokens: Tokens, kept: Bool[Array, "1 T"], gone: Bool[Array, "1 T"]) -> Tokens:
    """Averages each kept token with the removed tokens that are most similar to it, and adds their sizes."""
    x = tokens.x[None]
    target, _ = merging.nearest_key(x, kept)
    size = tokens.size.at[target[0]].add(jnp.where(gone[0], tokens.size, 0.0))
    return dataclasses.replace(tokens, x=merging.fold(x, x, target, gone)[0], size=size)
