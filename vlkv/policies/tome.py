"""ToMe: tokens of the image whose keys are alike become their average."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets, matching
from vlkv.observe import Observation, ordinal
from vlkv.policies.lightkv import check_layers, check_share, scaled, share_per_stage
from vlkv.policies.policy import Policy, policy
from vlkv.policies.reducing import ReducingPolicy
from vlkv.tokens import Tokens


@policy
class ToMe(ReducingPolicy):
    """Bipartite soft matching of all vision tokens of a row, between layers of the decoder (Bolya et al. 2023, Sec. 3).

    Tokens are compared by their keys in the layer just run, averaged over the key heads and rotated as they are cached.
    Every even one (A) finds the odd one (B) with the largest cosine; the closest r are merged, as averages weighted by
    how many tokens each stands for already. Made for image encoders; this is how LightKV's tables run it on a prompt.
    A vision token on no grid (a class token) is left alone, and order and positions of what is left stay. Attention
    does not weigh a merged token by its size (the paper's proportional attention).

    On the cache (LightKV's "ToMe (C)") the prompt is read whole, and every layer merges its own entries, keys and
    values alike and the same tokens in all heads: rounds that halve them, the last one cut short where `keep` is
    reached. There all vision tokens take part.

    Attributes:
        layers: how many layers run before each stage; None: 15, 23 and 31 of 40, scaled to the model. Every stage
            leaves the same share, the root of `keep`, rounded half up and at least a half.
        on: what is merged: "hidden" states while the prompt is read, or the "cache" afterwards, where `layers` means
            nothing and the rounds stand for its three stages, the last one for all that follow.
    """

    layers: tuple[int, ...] | None = None
    on: Literal["hidden", "cache"] = "hidden"
    stages = "reduce, or score and merge"
    paper = "Bolya et al. 2023, Token Merging: Your ViT But Faster"
    equations = "Sec. 3"

    def __post_init__(self) -> None:
        check_layers(self, self.layers)
        super().__post_init__()
        self.check("on", self.on in ("hidden", "cache"), 'must be "hidden" or "cache"')
        if self.on == "cache":
            self.check("layers", self.layers is None, 'is for on="hidden": on the cache every layer merges its own')
        else:
            check_share(self, self.stage_count, 'layers=, or on="cache"')

    @property
    def stage_count(self) -> int:
        """How many stages."""
        return 3 if self.layers is None else len(self.layers)

    @property
    def reducer(self) -> Policy | None:
        """Itself, unless it waits for the cache."""
        return None if self.on == "cache" else self

    def reductions(self, layers: int) -> tuple[int, ...]:
        """As `layers` says."""
        if self.on == "cache":
            return ()
        return scaled(layers) if self.layers is None else self.layers

    def left(self, most: int) -> Int[np.ndarray, " counts"]:
        """How many of 0..most mergeable tokens a stage leaves."""
        return budgets.totals(share_per_stage(self.last_keep, self.stage_count), None, layers=1, most=most)

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """As `left` says; each image may have one token that cannot be merged."""
        del stage
        lone = min(images, vision)
        return lone + int(self.left(vision - lone)[-1])

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
        """One stage."""
        assert obs is not None
        members = tokens.valid & tokens.is_vision & (tokens.grid[:, 1] >= 0)
        count = jnp.sum(members)
        removed = count - jnp.asarray(self.left(members.shape[0]))[count]
        target, turn = self.match(jnp.mean(obs.k, axis=0, dtype=jnp.float32), members, removed, stage=stage)
        merged = turn < removed
        x, size = self.combine(tokens.x, tokens.size, target, merged, stage=stage)
        return dataclasses.replace(tokens, x=x, size=size), tokens.valid & ~merged

    def match(
        self, metric: Float[Array, "T H"], members: Bool[Array, " T"], removed: Int[Array, ""], *, stage: int
    ) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """Where each of these members would go, and its turn: the first `removed` are merged, the closest even ones."""
        del removed, stage
        even = ordinal(members) % 2 == 0
        group = jnp.zeros(members.shape, jnp.int32)
        target, cosine = matching.closest(metric, members & ~even, group)
        return target, matching.turns(cosine, members & even, group)

    def combine(
        self,
        x: Float[Array, "T D"],
        size: Float[Array, " T"],
        target: Int[Array, " T"],
        merged: Bool[Array, " T"],
        *,
        stage: int,
    ) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
        """Vectors and sizes after merging: averages weighted by size."""
        del stage
        return matching.fold(x, size, target, merged), matching.sizes(size, target, merged)

    # --- on the cache -----------------------------------------------------------------------------------------------

    def rounds(
        self,
        k: Float[Array, "K T H"],
        v: Float[Array, "K T H"],
        members: Bool[Array, " T"],
        wanted: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "K T H"], Float[Array, "K T H"], Int[Array, " T"]]:
        """Merges the members until `wanted` are left; entries, and a number that is higher the longer a token lived.

        No fewer are left than halving as often as `keep` asks for, and once more, leaves.
        """
        length = members.shape[0]
        halvings = math.ceil(math.log2(1 / self.last_keep)) + 1 if self.last_keep < 1 else 0
        size, lived = jnp.ones(length), jnp.full(length, halvings * length)
        for number in range(halvings):
            count, stage = jnp.sum(members), min(number, self.stage_count - 1)
            removed = jnp.minimum(count // 2, jnp.maximum(count - wanted, 0))
            target, turn = self.match(jnp.mean(k, axis=0, dtype=jnp.float32), members, removed, stage=stage)
            merged = turn < removed

            def combine(x, size=size, target=target, merged=merged, stage=stage):
                return self.combine(x, size, target, merged, stage=stage)

            (k, sizes), (v, _) = (jax.vmap(combine)(x) for x in (k, v))
            size = sizes[0]
            lived = jnp.where(merged, number * length + turn, lived)
            members = members & ~merged
        return k, v, lived

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """On the cache, how long each token lives."""
        if self.on == "hidden":
            return super().score(obs)
        *_, lived = self.rounds(obs.k, obs.v, obs.in_scope, 1)
        return jnp.broadcast_to(lived.astype(jnp.float32), obs.k.shape[:2])

    def merge(
        self,
        k: Float[Array, "K T H"],
        v: Float[Array, "K T H"],
        kept: Bool[Array, "K T"],
        scores: Float[Array, "K T"],
    ) -> tuple[Float[Array, "K T H"], Float[Array, "K T H"]]:
        """On the cache, the same rounds again, as far as this layer's budget asks."""
        if self.on == "hidden":
            return k, v
        members = jnp.isfinite(scores[0])
        k, v, _ = self.rounds(k, v, members, jnp.sum(kept[0] & members))
        return k, v

    def total(self, counts: Int[Array, " L"], seen: Int[Array, ""], *, layers: int, most: int) -> Int[Array, ""]:
        """Everything that is left; on the cache `keep` of it."""
        if self.on == "cache":
            return Policy.total(self, counts, seen, layers=layers, most=most)
        return super().total(counts, seen, layers=layers, most=most)

    def bound(self, *, layers: int, vision: int, text: int, images: int = 1) -> int:
        """What the layers can hold; on the cache `keep` of it."""
        if self.on == "cache":
            return Policy.bound(self, layers=layers, vision=vision, text=text, images=images)
        return super().bound(layers=layers, vision=vision, text=text, images=images)
