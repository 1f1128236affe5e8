"""IVTP: patches alike are grouped before the decoder, and in it the instruction says which tokens matter."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets, merging
from vlkv.observe import Observation, head_mean, last, rows_mass, top
from vlkv.policies.policy import policy
from vlkv.policies.reducing import ReducingPolicy
from vlkv.tokens import Tokens


@policy
class IVTP(ReducingPolicy):
    """Keeps the vision tokens that the instruction attends to, after grouping those alike (Huang et al. 2024).

    No code was published, and the paper itself was not at hand. From its summaries: tokens are pruned in two places,
    in the tower in groups by what the class token attends to, in the decoder by what the instruction attends to. All
    else here is our reading. Groups: the tokens with the largest head-mean class attention in the last block that runs
    stay, every other one joins the nearest of them by cosine, over all images of the row, and a group's embedding is
    its mean, where its largest token stands. Instruction: head-mean attention of the rows after the last vision token
    in the layer just run (without any: of the last row). The paper rolls attention out over several layers, which
    needs T x T matrices; here one layer speaks.

    Attributes:
        layers: after how many layers tokens go. Each time the same fraction of what is there, so that `keep` survives
            the last; every stage rounds half up and keeps at least one.
        groups: fraction of the vision tokens that are left before the decoder, at least `keep`; None: no grouping.
    """

    layers: tuple[int, ...] = (2,)
    groups: float | None = None
    paper = "Huang et al. 2024, IVTP: Instruction-Guided Visual Token Pruning for Large Vision-Language Models (ECCV)"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.layers, tuple) and all(isinstance(a, int) and a >= 1 for a in self.layers)
        self.check("layers", whole and len(self.layers) >= 1, "must be a tuple of whole numbers of at least 1")
        valid = self.groups is None or (isinstance(self.groups, (int, float)) and self.last_keep <= self.groups <= 1)
        self.check("groups", valid, "must lie between keep and 1, or be None")

    def reductions(self, layers: int) -> tuple[int, ...]:
        """Before the decoder where tokens are grouped, then `layers`."""
        del layers
        return self.layers if self.groups is None else (0, *self.layers)

    @property
    def watches(self) -> tuple[int, ...]:
        """The last block that runs, for the groups."""
        return () if self.groups is None else (-1,)

    def fraction(self, stage: int) -> float:
        """What a stage leaves of the vision tokens that reach it."""
        grouped = 1.0 if self.groups is None else self.groups
        if self.groups is not None and stage == 0:
            return grouped
        return (self.last_keep / grouped) ** (1 / len(self.layers))

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """Its fraction, rounded half up."""
        del images
        return int(budgets.totals(self.fraction(stage), None, layers=1, most=vision)[-1])

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
        """Groups before the decoder, the best of the image in it."""
        vision = tokens.valid & tokens.is_vision
        table = budgets.totals(self.fraction(stage), None, layers=1, most=vision.shape[0])
        count: Int[Array, " 1"] = jnp.asarray(table)[jnp.sum(vision)][None]
        if obs is None:
            assert tokens.tower is not None
            best = top(jnp.mean(tokens.tower[-1], axis=0, keepdims=True), vision, count)
            tokens = grouped(tokens, best, vision[None] & ~best)
        else:
            best = top(self.ranking(obs), vision, count)
        return tokens, (tokens.valid & ~tokens.is_vision) | best[0]

    def ranking(self, obs: Observation) -> Float[Array, "1 T"]:
        """Head-mean attention of the instruction's rows, summed."""
        rows = jnp.where(jnp.any(obs.instruction), obs.instruction, last(obs.valid, 1))
        return head_mean(rows_mass(obs, rows, max(1, obs.max_instruction)), 1)


def grouped(tokens: Tokens, kept: Bool[Array, "1 T"], gone: Bool[Array, "1 T"]) -> Tokens:
    """Every token that goes joins the kept one most like it, which becomes the mean; `size` counts."""
    x = tokens.x[None]
    target, _ = merging.nearest_key(x, kept)
    size = tokens.size.at[target[0]].add(jnp.where(gone[0], tokens.size, 0.0))
    return dataclasses.replace(tokens, x=merging.fold(x, x, target, gone)[0], size=size)
