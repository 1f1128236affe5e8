from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets, matching
from vlkv.compression.policy import Entries, Facts, Kept, Mask, Observation, Scores, check_types
from vlkv.compression.reducing import StagedPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import ordinal
from vlkv.policies.lightkv import check_layers, check_share, scaled, share_per_stage


class ToMe(StagedPolicy):
    """Bipartite soft matching of all vision tokens of a row, between layers of the decoder (Bolya et al. 2023, Sec. 3).

    Tokens are compared by their keys in the last layer that ran, averaged over key heads. Every token with an even
    number (A) is matched with the one with an odd number (B) with the largest cosine. The closest r pairs are merged,
    as averages weighted by the number of tokens that each represents. LightKV's tables use the method on prompts in
    this way. Vision tokens without a grid position are not merged.

    On the cache (LightKV's "ToMe (C)"), every layer merges the keys and values of its own entries, in the same order in
    all heads. Each round halves their number, and the last round stops at the budget. In a composition with
    `allocate=`, this is the budget of each layer and head.

    Attributes:
        layers: how many layers run before each stage; None: 15, 23 and 31 of 40, scaled to the model. Every stage keeps
            the same share, at least a half: the n-th root of `keep`, with n stages. Counts are rounded half up.
        on: "hidden": merge hidden states during prefill; "cache": merge cache entries. On the cache, `layers` is not
            used; round i has the options of stage min(i, 3).
    """

    on: Literal["hidden", "cache"] = "hidden"
    facts = Facts(stages="reduce, or score and merge")
    keeps_placeless = True
    needs = ("own order",)
    idle = property(lambda self: ("reduce",) if self.on == "cache" else ("merge",))

    def __post_init__(self) -> None:
        check_types(self)
        check_layers(self, self.layers)
        super().__post_init__()
        if self.on == "cache":
            self.check("layers", self.layers is None, 'needs on="hidden"; on the cache every layer merges its entries')
        else:
            check_share(self, self.stage_count, 'layers=, or on="cache"')

    def after(self, layers: int) -> tuple[int, ...]:
        return scaled(layers)

    def left(self, most: int) -> Int[np.ndarray, " counts"]:
        """Number of tokens that a stage keeps, for every number 0..most of mergeable tokens."""
        return budgets.fraction(share_per_stage(self.last_keep, self.stage_count), most)

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """`left`, and one token without a grid position for each image, which cannot be merged."""
        unmergeable = min(images, vision)
        return unmergeable + int(self.left(vision - unmergeable)[-1])

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        assert obs is not None
        members = tokens.valid & tokens.is_vision & (tokens.grid[:, 1] >= 0)
        count = jnp.sum(members)
        removed = count - jnp.asarray(self.left(members.shape[0]))[count]
        target, rank = self.match(jnp.mean(obs.k, axis=0, dtype=jnp.float32), members, removed, stage=stage)
        merged = rank < removed
        x, size = self.combine(tokens.x, tokens.size, target, merged, stage=stage)
        return dataclasses.replace(tokens, x=x, size=size), tokens.valid & ~merged

    def match(
        self, metric: Float[Array, "T H"], members: Mask, removed: Int[Array, ""], *, stage: int
    ) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """The target of each member, and its rank in the order of merging, of which the first `removed` are merged."""
        even = ordinal(members) % 2 == 0
        group = jnp.zeros(members.shape, jnp.int32)
        target, cosine = matching.closest(metric, members & ~even, group)
        return target, matching.merge_order(cosine, members & even, group)

    def combine(
        self, x: Float[Array, "T D"], size: Array, target: Array, merged: Mask, *, stage: int
    ) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
        return matching.fold(x, size, target, merged), matching.sizes(size, target, merged)

    # --- on the cache -----------------------------------------------------------------------------------------------

    def rounds(
        self, k: Entries, v: Entries, members: Mask, wanted: Int[Array, " K"]
    ) -> tuple[Entries, Entries, Int[Array, " T"]]:
        """Merges the members of each head until `wanted` of them are left.

        All heads merge in the same order, and a head with a larger budget stops earlier. The order is that of a head
        that never stops: its keys (`_Round.common`) are the ones that are compared.

        Returns:
            Keys and values; and for each token, when a head that never stops merges it, as a number that increases with
            time.
        """
        length, number_of_rounds = len(members), max(1, (len(members) - 1).bit_length())
        never = jnp.full(length, number_of_rounds * length)
        last = self.stage_count - 1

        def run(state: _Round, number: Int[Array, ""] | int, stage: int) -> _Round:
            count = jnp.sum(state.members)
            metric = jnp.mean(state.common, axis=0, dtype=jnp.float32)

            def matched(removed: Int[Array, ""]) -> tuple[Int[Array, " T"], Int[Array, " T"], Mask]:
                target, rank = self.match(metric, state.members, removed, stage=stage)
                return target, rank, rank < removed

            def combine(x: Array, size: Array, target: Array, gone: Array) -> tuple[Array, Array]:
                return self.combine(x, size, target, gone, stage=stage)

            target, rank, gone = matched(count // 2)
            common, sizes = jax.vmap(combine, (0, None, None, None))(state.common, state.common_size, target, gone)
            # In each head, as many as it still has to remove.
            head_target, _, head_gone = jax.vmap(matched)(jnp.minimum(count // 2, jnp.maximum(count - wanted, 0)))
            k, size = jax.vmap(combine)(state.k, state.size, head_target, head_gone)
            v, _ = jax.vmap(combine)(state.v, state.size, head_target, head_gone)
            merged_at = jnp.where(gone, number * length + rank, state.merged_at)
            return _Round(k, v, size, common, sizes[0], state.members & ~gone, merged_at)

        ones = jnp.ones(length)
        state = _Round(k, v, jnp.ones(k.shape[:2]), k, ones, members, never)
        for number in range(min(last, number_of_rounds)):
            state = run(state, number, number)
        state = jax.lax.fori_loop(last, max(last, number_of_rounds), lambda i, state: run(state, i, last), state)
        return state.k, state.v, state.merged_at

    def score(self, obs: Observation) -> Scores:
        """On the cache: when each token would be merged; later is better. On hidden states: equal scores."""
        if self.on == "hidden":
            return super().score(obs)
        *_, merged_at = self.rounds(obs.k, obs.v, obs.in_scope, jnp.ones(len(obs.k), jnp.int32))
        return jnp.broadcast_to(merged_at.astype(jnp.float32), obs.k.shape[:2])

    def merge(self, k: Entries, v: Entries, kept: Kept, scores: Scores) -> tuple[Entries, Entries]:
        members = jnp.isfinite(scores[0])
        k, v, _ = self.rounds(k, v, members, jnp.sum(kept & members, axis=1))
        return k, v


class _Round(NamedTuple):
    """The state between two rounds on the cache."""

    k: Entries
    v: Entries
    size: Float[Array, "K T"]
    # Of heads that never stop: keys, numbers of tokens that these represent, tokens that are left, and when each token
    # has been merged.
    common: Entries
    common_size: Float[Array, " T"]
    members: Mask
    merged_at: Int[Array, " T"]
