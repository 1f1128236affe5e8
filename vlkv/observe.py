"""The observation of one layer that policies score, and measurements that several methods share.

Unbatched: the caller applies vmap over B. Axes: T tokens · R sets of rows · N query heads · K key heads · G = N/K ·
H head dim. Every measured attention comes from `attention_mass`, so nothing here builds a T x T matrix.
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
    """Queries, keys and values of one layer, just after it has run, for one row of the batch."""

    q: Float[Array, "N T H"]
    k: Float[Array, "K T H"]
    v: Float[Array, "K T H"]
    is_vision: Bool[Array, " T"]
    valid: Bool[Array, " T"]
    in_scope: Bool[Array, " T"]  # candidates in the policy's scope
    mean_budget: Int[Array, ""]  # mean number of tokens in scope that a layer keeps
    key: Key[Array, ""] | None  # random key of this row and layer
    layer: int = dataclasses.field(metadata={"static": True})
    max_instruction: int = dataclasses.field(metadata={"static": True})  # bound on the instruction's length
    grid: Int[Array, "T 3"] | None = None  # (image number in the prompt, line, column) of the patch; -1: none
    lse: Float[Array, "N T"] | None = None  # log-sum-exp of each row's logits; None: not computed
    kernels: Kernels = dataclasses.field(default=Kernels(), metadata={"static": True})  # implementations of the ops

    @property
    def instruction(self) -> Bool[Array, " T"]:
        """Text after the last vision token, with the template's closing text; all valid tokens if there is no image."""
        place = jnp.arange(self.valid.shape[0])
        return self.valid & (place > jnp.max(jnp.where(self.is_vision, place, -1)))


def ordinal(mask: Bool[Array, " T"]) -> Int[Array, " T"]:
    """Each token's index among those in the mask, starting at 0; not defined for tokens outside it."""
    return jnp.cumsum(mask) - 1


def first(mask: Bool[Array, " T"], count: Int[Array, ""] | int) -> Bool[Array, " T"]:
    """The first `count` tokens of a mask."""
    return mask & (ordinal(mask) < count)


def last(mask: Bool[Array, " T"], count: Int[Array, ""] | int) -> Bool[Array, " T"]:
    """The last `count` tokens of a mask."""
    return mask & (ordinal(mask) >= jnp.sum(mask) - count)


def tokens_at(place: Int[Array, " T"], places: int) -> Int[Array, " n"]:
    """Inverse of `place`: the token at each place from 0 to places - 1; -1: none. Larger places are ignored."""
    token = jnp.arange(place.shape[0], dtype=jnp.int32)
    return jnp.full(places, -1, jnp.int32).at[place].set(token, mode="drop", wrap_negative_indices=False)


def binary_search(bits: int, holds: Callable[[Any], Any], shape: tuple[int, ...] = ()) -> UInt32[Array, "*shape"]:
    """The largest `bits`-bit integer that satisfies `holds`, which must be true up to a threshold; 0 if none does."""

    def set_bit(i: Int[Array, ""], number: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
        higher = number | jnp.uint32(1 << bits - 1) >> i.astype(jnp.uint32)
        return jnp.where(holds(higher), higher, number)

    return jax.lax.fori_loop(0, bits, set_bit, jnp.zeros(shape, jnp.uint32))


def top(
    x: Float[Array, "K T"], candidates: Bool[Array, "#K T"] | Bool[Array, " T"], count: Int[Array, " K"]
) -> Bool[Array, "K T"]:
    """The `count` best candidates of each head, or all if there are fewer; ties: the earlier token. NaN counts as -inf.

    Binary search in the ordered bits of a float32 finds the worst value that is taken: 32 counts instead of a sort.
    """
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # 0 and -0 are equal
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), -jnp.inf, x), jnp.int32)
    order = jax.lax.bitcast_convert_type(bits ^ (bits >> 31 & 0x7FFFFFFF), jnp.uint32) ^ jnp.uint32(1 << 31)
    order = jnp.where(candidates, order, 0)  # below every float
    wanted = count[:, None]

    least = binary_search(32, lambda least: jnp.sum(order >= least, axis=1, keepdims=True) >= wanted, wanted.shape)
    above, equal = order > least, order == least
    left = wanted - jnp.sum(above, axis=1, keepdims=True)
    return (above | equal & (jnp.cumsum(equal, axis=1) <= left)) & candidates


def group_mean(x: Float[Array, "N T"], kv_heads: int) -> Float[Array, "K T"]:
    """Mean over the query heads that share a key head."""
    return jnp.mean(x.reshape(kv_heads, -1, x.shape[-1]), axis=1)


def head_mean(x: Float[Array, "N T"], kv_heads: int) -> Float[Array, "K T"]:
    """Mean over all query heads, repeated for every key head."""
    return jnp.broadcast_to(jnp.mean(x, axis=0), (kv_heads, x.shape[-1]))


def column_sums(obs: Observation, **options: Any) -> Float[Array, "N T"]:
    """Attention that each token receives from itself and all later tokens, summed.

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
    """Causal attention summed over a few rows, with a softmax over `keys` (None: all valid tokens).

    Only the last `most` rows of the mask (or of `among`, if it is given) are used. This static bound makes it cheap:
    the rows are gathered first, instead of a second attention pass over all T rows. `options` are those of
    `split_rows_mass`.
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
    """`rows_mass` for R sets of rows, each summed separately.

    The last `most` rows of `among` (None: of all parts together) are gathered. Give `among` if it is the same in all
    layers, so that XLA computes its indices only once. Other options go to `attention_mass`.
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
    """Smooths scores along the tokens with an odd kernel; outside values count as 0 (SnapKV, Sec. 4)."""
    reduce, start = (jax.lax.add, 0.0) if kind == "avg" else (jax.lax.max, -jnp.inf)
    half = kernel // 2
    padded = jnp.pad(x, [(0, 0), (half, half)])
    y = jax.lax.reduce_window(padded, start, reduce, (1, kernel), (1, 1), "VALID")
    return y / kernel if kind == "avg" else y
