from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets, matching
from vlkv.compression.observe import Observation, each_row, head_mean, instruction, rows_mass
from vlkv.compression.option_types import Unit
from vlkv.compression.policy import Mask
from vlkv.compression.reducing import StagedPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import last, top


class SparseVLM(StagedPolicy):
    """In several stages, keeps the vision tokens that selected instruction tokens attend to most (Zhang et al. 2024).

    The raters are the instruction tokens whose mean share of softmax(x_v t^T), over all vision tokens v, is above
    average; x and t are the inputs of the first layer (Sec. 3.2). After each of `layers`, vision tokens are ranked by
    the raters' attention in the last layer that ran. Of the others, the best `recycled` are clustered
    (`matching.density_peaks`), and a cluster becomes its mean, at the position of its centre.

    Attributes:
        layers: how many layers run before each stage; None: 3, 7 and 16 of 32, scaled to the model.
        number: "fixed": every stage keeps its share of the tokens; "rank": it keeps at most as many as the rank of the
            raters' attention, and at least one.
        recycled: fraction of the removed tokens that is clustered, rounded down, plus one; 0: none is.
        clusters: number of clusters as a fraction of the recycled tokens, rounded down, plus one.
    """

    number: Literal["fixed", "rank"] = "fixed"
    recycled: Unit = 0.3
    clusters: Unit = 0.1

    def after(self, layers: int) -> tuple[int, ...]:
        return tuple(max(i + 1, round(n * layers / 32)) for i, n in enumerate((3, 7, 16)))

    def reductions(self, layers: int) -> tuple[int, ...]:
        return (0, *super().reductions(layers))

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        return vision if stage == 0 else super().remaining(stage=stage, vision=vision, images=images)

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        """Marks the raters before the first layer; later keeps text, the best vision tokens, and clusters of others."""
        vision, text = tokens.valid & tokens.is_vision, tokens.valid & ~tokens.is_vision
        if obs is None:
            return dataclasses.replace(tokens, marked=raters(tokens)), tokens.valid
        assert tokens.marked is not None
        rows, most = tokens.marked & tokens.valid, max(1, obs.max_instruction)
        rows = jnp.where(jnp.any(rows), rows, last(tokens.valid, 1))  # the only rater may have been a vision token
        score, count = head_mean(rows_mass(obs, rows, most), 1)[0], self.count(vision, self.share)
        if self.number == "rank":
            attention = jnp.where(vision, jnp.mean(each_row(obs, rows, most), axis=1), 0.0)
            count = jnp.clip(rank(attention, jnp.sum(rows), jnp.sum(vision)), 1, count)
        recycled, clusters = self.numbers(jnp.sum(vision) - count, count, len(vision))
        best = top(score[None], vision, (count - clusters)[None])[0]
        pool = top(score[None], vision & ~best, recycled[None])[0]
        tokens, centres = self.cluster(tokens, pool, clusters)
        return tokens, text | best | centres

    def numbers(
        self, removed: Int[Array, ""], count: Int[Array, ""], most: int
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Numbers of recycled tokens and of their clusters; at least one of `count` tokens is not a cluster."""
        if self.recycled == 0:
            return jnp.zeros_like(removed), jnp.zeros_like(removed)
        recycled = budgets.share(self.recycled, removed, most) + 1
        clusters = jnp.minimum(budgets.share(self.clusters, recycled, most + 1) + 1, jnp.minimum(recycled, count - 1))
        any_left = (removed > 0) & (clusters > 0)
        return jnp.where(any_left, recycled, 0), jnp.where(any_left, clusters, 0)

    def cluster(self, tokens: Tokens, pool: Mask, clusters: Int[Array, ""]) -> tuple[Tokens, Mask]:
        """The tokens with means of clusters at their centres, and these centres."""
        length = len(pool)
        # The tokens of the pool come first, up to a static bound on their number.
        place = jnp.argsort(~pool, stable=True)[: int(self.recycled * length) + 1]
        is_centre, target = matching.density_peaks(tokens.x[place], pool[place], clusters)
        centres = jnp.zeros_like(pool).at[place].set(is_centre)
        target = jnp.zeros(length, jnp.int32).at[place].set(place[target])
        joining = pool & ~centres
        x = matching.fold(tokens.x, jnp.ones(length), target, joining)
        return dataclasses.replace(tokens, x=x, size=matching.sizes(tokens.size, target, joining)), centres


def raters(tokens: Tokens) -> Mask:
    """The instruction tokens that concern the image; the last token if there is no instruction."""
    vision, text = tokens.valid & tokens.is_vision, instruction(tokens.is_vision & tokens.valid, tokens.valid)
    share = matching.mean_softmax(tokens.x, vision, text)
    above = text & (share > jnp.sum(share) / jnp.maximum(jnp.sum(text), 1))
    # Equal shares, as of a single token, are not above their mean.
    return jnp.where(jnp.any(above), above, jnp.where(jnp.any(text), text, last(tokens.valid, 1)))


def rank(x: Float[Array, "R T"], rows: Int[Array, ""], columns: Int[Array, ""]) -> Int[Array, ""]:
    """Rank of a matrix of rows x columns that is padded with zeros, with the tolerance of numpy and torch."""
    values = jnp.linalg.svd(x, compute_uv=False)
    tolerance = jnp.max(values) * jnp.maximum(rows, columns) * jnp.finfo(jnp.float32).eps
    return jnp.sum(values > tolerance)
