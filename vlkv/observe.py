"""What a policy sees of one layer, and the measurements that several methods share.

Unbatched: B is vmapped outside. Axes: T tokens · W rows of an observation window · N query heads · K key heads ·
G = N/K · H head dim. Every score comes from `attention_mass`, so none of this builds a T x T matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from pallas_kernels import Kernels
from vlkv.parallel import attention_mass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """One layer after its attention, one row of the batch."""

    q: Float[Array, "N T H"]
    k: Float[Array, "K T H"]
    v: Float[Array, "K T H"]
    is_vision: Bool[Array, " T"]
    valid: Bool[Array, " T"]
    in_scope: Bool[Array, " T"]  # valid, and of the policy's scope
    mean_budget: Int[Array, ""]  # what a layer keeps of the tokens in scope, on average
    key: Key[Array, ""] | None  # of this row and layer
    layer: int = dataclasses.field(metadata={"static": True})
    max_instruction: int = dataclasses.field(metadata={"static": True})  # bound on the instruction's length
    grid: Int[Array, "T 3"] | None = None  # number of its image in the row, line and column of its patch; -1: none
    lse: Float[Array, "N T"] | None = None  # log-sum-exp of each row's logits; None: not known
    kernels: Kernels = dataclasses.field(default=Kernels(), metadata={"static": True})  # implementations of the ops

    @property
    def instruction(self) -> Bool[Array, " T"]:
        """Text after the last vision token; everything where there is no image."""
        place = jnp.arange(self.valid.shape[0])
        return self.valid & (place > jnp.max(jnp.where(self.is_vision, place, -1)))


def ordinal(mask: Bool[Array, " T"]) -> Int[Array, " T"]:
    """Each token's number among those in the mask, counting from 0 (meaningless outside it)."""
    return jnp.cumsum(mask) - 1


def first(mask: Bool[Array, " T"], count: Int[Array, ""] | int) -> Bool[Array, " T"]:
    """The first `count` tokens of a mask."""
    return mask & (ordinal(mask) < count)


def last(mask: Bool[Array, " T"], count: Int[Array, ""] | int) -> Bool[Array, " T"]:
    """The last `count` tokens of a mask."""
    return mask & (ordinal(mask) >= jnp.sum(mask) - count)


def tokens_at(place: Int[Array, " T"], places: int) -> Int[Array, " n"]:
    """Which token has each place from 0 to places - 1; -1: none. Tokens with places past the end have none."""
    token = jnp.arange(place.shape[0], dtype=jnp.int32)
    return jnp.full(places, -1, jnp.int32).at[place].set(token, mode="drop", wrap_negative_indices=False)


def largest(bits: int, holds: Callable[[Any], Any], shape: tuple[int, ...] = ()) -> UInt32[Array, "*shape"]:
    """The largest number of so many bits for which `holds`, which holds of all below one that it holds of; or 0."""

    def set_bit(i: Int[Array, ""], number: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
        higher = number | jnp.uint32(1 << bits - 1) >> i.astype(jnp.uint32)
        return jnp.where(holds(higher), higher, number)

    return jax.lax.fori_loop(0, bits, set_bit, jnp.zeros(shape, jnp.uint32))


def top(
    x: Float[Array, "K T"], candidates: Bool[Array, "#K T"] | Bool[Array, " T"], count: Int[Array, " K"]
) -> Bool[Array, "K T"]:
    """The `count` best candidates of each head, or all there are; ties to the earlier, and no number counts as -inf.

    Finds the worst that is taken by bisecting the ordered bits of a float32: 32 counts instead of a sort.
    """
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # of two zeros neither is the better
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), -jnp.inf, x), jnp.int32)
    order = jax.lax.bitcast_convert_type(bits ^ (bits >> 31 & 0x7FFFFFFF), jnp.uint32) ^ jnp.uint32(1 << 31)
    order = jnp.where(candidates, order, 0)  # below every float
    wanted = count[:, None]

    least = largest(32, lambda least: jnp.sum(order >= least, axis=1, keepdims=True) >= wanted, wanted.shape)
    above, equal = order > least, order == least
    left = wanted - jnp.sum(above, axis=1, keepdims=True)
    return (above | equal & (jnp.cumsum(equal, axis=1) <= left)) & candidates


def group_mean(x: Float[Array, "N T"], kv_heads: int) -> Float[Array, "K T"]:
    """Mean over the query heads that read one key head."""
    return jnp.mean(x.reshape(kv_heads, -1, x.shape[-1]), axis=1)


def head_mean(x: Float[Array, "N T"], kv_heads: int) -> Float[Array, "K T"]:
    """Mean over all query heads, the same for every key head."""
    return jnp.broadcast_to(jnp.mean(x, axis=0), (kv_heads, x.shape[-1]))


def column_sums(obs: Observation, **options: Any) -> Float[Array, "N T"]:
    """Attention that each token receives from all tokens after it and from itself.

    `options` are `statistic`, `threshold` and `softmax_n` of `attention_mass`.
    """
    weight = obs.valid[None].astype(jnp.float32)
    return attention_mass(
        obs.q, obs.k, row_weight=weight, key_mask=obs.valid, lse=obs.lse, implementation=obs.kernels.attention_mass,
        **options,
    )[0]  # fmt: skip


def rows_mass(
    obs: Observation, rows: Bool[Array, " T"], most: int, *, keys: Bool[Array, " T"] | None = None, **options: Any
) -> Float[Array, "N T"]:
    """Attention summed over a few rows, softmax over `keys` (None: all valid), causal.

    At most the last `most` rows of the mask take part: a static bound, because gathering a few rows costs a few rows,
    while masking all T would cost a second attention pass. `options` as `split_rows_mass`.
    """
    return split_rows_mass(obs, rows[None], most, keys=keys, **options)[0]


def split_rows_mass(
    obs: Observation,
    parts: Bool[Array, "R T"],
    most: int,
    *,
    keys: Bool[Array, " T"] | None = None,
    among: Bool[Array, " T"] | None = None,
    **options: Any,
) -> Float[Array, "R N T"]:
    """As `rows_mass`, with the rows split into R parts that are summed apart.

    `among` are the rows of which the last `most` are gathered, None: those of the parts. Where all layers gather the
    same rows, and choose among them by weight, they are looked up once. Other options go to `attention_mass`.
    """
    rows = jnp.any(parts, axis=0) if among is None else among
    most = min(most, rows.shape[0])
    from_last = jnp.sum(rows) - 1 - ordinal(rows)
    picked = tokens_at(jnp.where(rows, from_last, most), most)
    present = picked >= 0
    picked = jnp.maximum(picked, 0)
    q, of_part = (x.at[:, picked].get(mode="promise_in_bounds", wrap_negative_indices=False) for x in (obs.q, parts))
    return attention_mass(
        q,
        obs.k,
        row_weight=(present & of_part).astype(jnp.float32),
        key_mask=obs.valid if keys is None else keys,
        row_place=picked,
        implementation=obs.kernels.attention_mass,
        **options,
    )


def pool(x: Float[Array, "K T"], kernel: int, kind: Literal["avg", "max"]) -> Float[Array, "K T"]:
    """Smooths scores along the tokens, kernel odd, outside counts as zeros (SnapKV, Sec. 4)."""
    reduce, start = (jax.lax.add, 0.0) if kind == "avg" else (jax.lax.max, -jnp.inf)
    half = kernel // 2
    padded = jnp.pad(x, [(0, 0), (half, half)])
    y = jax.lax.reduce_window(padded, start, reduce, (1, kernel), (1, 1), "VALID")
    return y / kernel if kind == "avg" else y
