"""ToMe: merges vision tokens with similar keys into their average."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression import budgets, matching
from vlkv.compression.observe import Observation
from vlkv.compression.option_types import Positive
from vlkv.compression.policy import Facts, ReducingStages, check_types
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import ordinal
from vlkv.policies.lightkv import check_layers, check_share, scaled, share_per_stage


class ToMe(ReducingPolicy):
    """Bipartite soft matching of all vision tokens of a row, between layers of the decoder (Bolya et al. 2023, Sec. 3).

    Tokens are compared by their keys in the last layer that ran, averaged over key heads and rotated. Every token with
    an even number (A) finds the one with an odd number (B) with the largest cosine. The closest r pairs are merged, as
    averages weighted by the number of tokens that each represents. The method was made for image encoders; LightKV's
    tables use it on prompts in this way. Vision tokens without a grid position (a class token) are not merged. The
    other tokens keep their order and positions. Attention does not weight a merged token by its size (the paper's
    proportional attention).

    On the cache (LightKV's "ToMe (C)"), prefill processes the whole prompt, and every layer merges the keys and values
    of its own entries, the same tokens in all heads. Each round halves them; the last one ends when `keep` is reached.
    All vision tokens take part.

    Attributes:
        layers: numbers of layers before the stages; None: 15, 23 and 31 of 40, scaled to the model. Every stage keeps
            the same share, the root of `keep`, rounded half up and at least a half.
        on: "hidden": merge hidden states during prefill; "cache": merge cache entries. On the cache, `layers` is not
            used; round i has the options of stage min(i, 3).
    """

    layers: tuple[Positive, ...] | None = None
    on: Literal["hidden", "cache"] = "hidden"
    facts = Facts(
        paper="Bolya et al. 2023, Token Merging: Your ViT But Faster",
        equations="Sec. 3",
        source="arXiv:2210.09461; github.com/facebookresearch/ToMe",
        stages="reduce, or score and merge",
        keeps_placeless=True,
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_layers(self, self.layers)
        super().__post_init__()
        if self.on == "cache":
            self.check("layers", self.layers is None, 'needs on="hidden"; on the cache every layer merges its entries')
        else:
            check_share(self, self.stage_count, 'layers=, or on="cache"')

    @property
    def stage_count(self) -> int:
        """Number of stages."""
        return 3 if self.layers is None else len(self.layers)

    @property
    def reducer(self) -> ReducingStages | None:
        """The policy itself; None if it merges cache entries."""
        return None if self.on == "cache" else self

    def reductions(self, layers: int) -> tuple[int, ...]:
        """`layers`, or the default."""
        return scaled(layers) if self.layers is None else self.layers

    def left(self, most: int) -> Int[np.ndarray, " counts"]:
        """Number of tokens that a stage keeps, for every number 0..most of mergeable tokens."""
        return budgets.fraction(share_per_stage(self.last_keep, self.stage_count), most)

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """`left`, if each image has one token that cannot be merged."""
        lone = min(images, vision)
        return lone + int(self.left(vision - lone)[-1])

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
        """Merges similar vision tokens."""
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
        """The target of each member, and its number in the order of merging; the first `removed` are merged."""
        even = ordinal(members) % 2 == 0
        group = jnp.zeros(members.shape, jnp.int32)
        target, cosine = matching.closest(metric, members & ~even, group)
        return target, matching.merge_order(cosine, members & even, group)

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
        return matching.fold(x, size, target, merged), matching.sizes(size, target, merged)

    # --- on the cache -----------------------------------------------------------------------------------------------

    def rounds(
        self,
        k: Float[Array, "K T H"],
        v: Float[Array, "K T H"],
        members: Bool[Array, " T"],
        wanted: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "K T H"], Float[Array, "K T H"], Int[Array, " T"]]:
        """Merges the members until `wanted` are left. Returns keys, values and the time at which each was merged.

        The number of rounds is static: one more than `keep` needs.
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
        """On the cache: the time at which each token would be merged, later is better. Otherwise equal scores."""
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
        """On the cache: the rounds again, until this layer's budget is reached."""
        if self.on == "hidden":
            return k, v
        members = jnp.isfinite(scores[0])
        k, v, _ = self.rounds(k, v, members, jnp.sum(kept[0] & members))
        return k, v
