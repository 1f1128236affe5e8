from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.matching import unit
from vlkv.compression.observe import Observation
from vlkv.compression.option_types import Unit
from vlkv.compression.policy import Facts, Mask, Policy, Scores
from vlkv.compression.smooth import Smooth
from vlkv.errors import InputError
from vlkv.masks import last, ordinal, top

_WINDOWS = Smooth((7, 7)), Smooth((5, 5)), Smooth(3)  # of the first three quarters of the layers


class InfiniPotV(Policy):
    """What changes in time, and large values, for videos without an end (Kim et al. 2025), as in the authors' code.

    A part of the budget is for what changes: the newest frames, and of the others the patches whose keys are least
    similar to those of the same patch in the newest frames. The rest is for the tokens with the largest values, whose
    norms are averaged over a window of patches in early layers, and of tokens in later ones. Text since the first of
    the newest frames is kept like these, and other text by its values.

    Attributes:
        temporal: share of the budget for what changes.
        recent: share of the vision tokens that are the newest frames; the newest frame alone if it has more, and none
            in a prompt of one frame.
        pooled: average the norms.
    """

    temporal: Unit = 0.5
    recent: Unit = 0.25
    pooled: bool = True
    uses = ("grid",)
    facts = Facts(observes=False)

    def score(self, obs: Observation) -> Scores:
        if obs.grid is None:
            raise InputError("InfiniPotV compares the patches of frames: pass grid=inputs.grid[row]")
        patch = obs.in_scope & obs.is_vision & (obs.grid[:, 1] >= 0)
        grid = numbered(obs.grid, patch)
        norm = self.values(dataclasses.replace(obs, grid=grid))
        norm /= jnp.maximum(jnp.max(jnp.where(obs.in_scope, norm, 0.0), axis=1, keepdims=True), 1e-12)
        newest = obs.in_scope & (jnp.cumsum(self.newest(grid[:, 0], patch)) > 0)
        count = jnp.round(self.temporal * obs.mean_budget).astype(jnp.int32)
        kept = last(newest, count)
        more = jnp.broadcast_to(count - jnp.sum(kept), len(obs.k))
        changed = top(-similarity(obs.k, grid, newest & patch), patch & ~newest, more)
        return norm + 2.0 * changed + 4.0 * kept

    def values(self, obs: Observation) -> Scores:
        """The norms of the values, averaged as the layer's quarter says."""
        norm = jnp.linalg.norm(obs.v.astype(jnp.float32), axis=-1)
        if not self.pooled:
            return norm
        branches: list[Callable[[Scores], Scores]] = [*(partial(window, obs=obs) for window in _WINDOWS), lambda x: x]
        quarter = 4 * obs.layer // obs.budget.layers
        return branches[quarter](norm) if isinstance(quarter, int) else jax.lax.switch(quarter, branches, norm)

    def newest(self, frame: Int[Array, " T"], patch: Mask) -> Mask:
        """Patches of the newest frames."""
        total, length = jnp.sum(patch), len(patch)
        first = jax.ops.segment_min(ordinal(patch), jnp.where(patch, frame, length), length + 1)[frame]
        few = total - first <= budgets.share(self.recent, total, length)  # patches of this frame and of later ones
        return patch & (frame > 0) & (few | (frame == jnp.max(jnp.where(patch, frame, -1))))


def numbered(grid: Int[Array, "T 3"], patch: Mask) -> Int[Array, "T 3"]:
    """The grid with frames numbered from 0, whatever numbers the frames of a long video have; text has frame 0."""
    latest = jax.lax.cummax(jnp.where(patch, grid[:, 0], -1))
    number = jnp.cumsum(patch & (latest > jnp.append(-1, latest[:-1]))) - 1
    return grid.at[:, 0].set(jnp.where(patch, number, 0))


def similarity(k: Float[Array, "K T H"], grid: Int[Array, "T 3"], newest: Mask) -> Scores:
    """Mean cosine of each key with those of the same patch in the newest frames; 0 if these do not have it."""
    _, line, column = grid.T
    _, place = jnp.unique(line * (jnp.max(column) + 1) + column, return_inverse=True, size=len(line))
    count = jax.ops.segment_sum(newest.astype(jnp.float32), place, len(line))

    def of_head(k: Float[Array, "T H"]) -> Float[Array, " T"]:
        k = unit(k)
        total = jax.ops.segment_sum(jnp.where(newest[:, None], k, 0.0), place, len(line))
        return jnp.sum(k * (total / jnp.maximum(count, 1.0)[:, None])[place], axis=1)

    return jax.vmap(of_head)(k)
