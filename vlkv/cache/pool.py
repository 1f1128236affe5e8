"""The packed cache: kept prompt entries of all layers in one pool; generated tokens in a tail or in free slots.

Axes: B batch · L layers with full attention · K key heads · T prompt tokens, or entries to write · P pool slots ·
S tail slots · H head dim · A position axes · M parts of the slots. A slot is a location in the pool; a position is the
value that RoPE uses. Budgets differ per layer and row, but have a fixed sum, so one pool needs less memory than L
padded arrays.

The pool has a column for each key head, in which the segments of all layers follow one another. A segment contains the
entries of one layer, row and key head: vision entries, then text, then free slots, if slots are reused. If the policy
gives heads different budgets (`Facts.budgets`), columns of equal length would waste memory, so the pool has one
column, which contains the segments of all heads (`#K` in the shapes below: K or 1).

A layer with a sliding window has no segment. Its ring (`rings.py`) has the newest entries, whatever the policy is.
Neither has a layer with a recurrence, which has a state of constant size (`states.py`).

If the `model` axis of the mesh does not divide the columns, pool and tail consist of M equal parts, and every M-th
entry is in the same part. `parts.slot_of` returns the slot of an entry for every M.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels import (
    DigitPool,
    Kernels,
    Quantized,
    QuantizedPool,
    quantize,
    quantize_digits,
    quantize_rotated,
    swap_slots,
)
from vlkv.cache import decode_state
from vlkv.cache.decode_state import DecodeState, Updater
from vlkv.cache.marks import UNLIMITED, Reselection
from vlkv.cache.parts import Part, slot_of, split
from vlkv.cache.rings import Rings
from vlkv.cache.states import State
from vlkv.errors import InputError
from vlkv.sharding.placement import axes, leaves_with_axes, map_with_axes

ALIGNMENT = 16  # slots: every segment starts on a bf16 tile

_POOL, _TABLE = axes("batch", "kv_heads", "slots"), axes(None, "batch", "kv_heads")
_TAIL = axes("batch", "kv_heads", None, "slots")


class Storage(NamedTuple):
    """Quantisation of the pool.

    Attributes:
        bits: per number.
        group: numbers that share a scale and a minimum (KIVI); None: a vector has a norm (TurboQuant).
        window: how many of the last generated tokens attention sees in full precision; None: all of them.
        tail: whether generated tokens are quantised too (TurboQuant).
        budget_digits: digits of 2 bits that each number of a key and of a value adds to the budget, if budgets are
            bits. (8, 8) are 16 bits for every number; the policy divides the sum unequally. None: all numbers have
            equal bits.
    """

    bits: int
    group: int | None
    window: int | None = None
    tail: bool = False
    budget_digits: tuple[int, int] | None = None

    def quantize(
        self, k: Array, v: Array, used: Array, digits: Digits | None = None, most: tuple[int, int] = (0, 0)
    ) -> tuple[Quantized, Quantized]:
        """Keys and values of a pool [B, #K, P, H], of which the slots `used` [B, #K, P] are used.

        With `budget_digits`, `digits` has the values' digits for each slot [B, K, P] in place of each token, and `most`
        is the number of digits of a segment for each number of keys and of values.
        """
        if digits is not None:
            return _quantize_unequally(k, v, used, digits, most)
        if self.group is None:
            return quantize_rotated(k, used, bits=self.bits), quantize_rotated(v, used, bits=self.bits)
        along = partial(quantize, bits=self.bits, group=self.group)
        return along(k, used, axis="slots"), along(v, used, axis="channels")

    def chosen_digits(self, statistics: dict[str, Any]) -> Digits | None:
        """With `budget_digits`, the digits of all numbers, which the policy has chosen; else None."""
        return None if self.budget_digits is None else statistics["digits"]

    def bytes_per_number(self, number: int, channels: int) -> float:
        """Mean bytes of a stored number, if `number` bytes are those of a scale and a vector has `channels`.

        With `budget_digits` it is that of as many entries as the digits allow, without the few ranges of keys.
        """
        if self.budget_digits is not None:
            return sum(self.budget_digits) / (8 * self.budget_digits[1]) + (2 * number + 1) / (2 * channels)
        return self.bits / 8 + number * (1 / channels if self.group is None else 2 / self.group)


class Digits(NamedTuple):
    """The number of digits of 2 bits with which each number is stored, if numbers have unequal bits."""

    values: UInt8[Array, "..."]  # [L, B, K, T], one for each value vector
    keys: UInt8[Array, "L B K H"]  # one for each channel of the keys of a segment


def segment_slots(slots: int, layers: int) -> int:
    """Slots of a segment, if all segments of a pool have equally many."""
    return slots // layers // ALIGNMENT * ALIGNMENT


def _quantize_unequally(
    k: Array, v: Array, used: Array, digits: Digits, most: tuple[int, int]
) -> tuple[DigitPool, DigitPool]:
    """`Storage.quantize` for numbers of unequal bits. All segments have equally many slots."""
    layers, (*_, slots, channels) = len(digits.keys), k.shape
    segment = segment_slots(slots, layers)

    def cut(x: Array) -> Array:
        return x[:, :, : layers * segment].reshape(*x.shape[:2], layers, segment, *x.shape[3:])

    of_keys, of_values = (number * channels // 4 for number in most)  # bytes of a segment
    keys = quantize_digits(cut(k), cut(used), jnp.moveaxis(digits.keys, 0, 2), axis="slots", size=of_keys, slots=slots)
    values = quantize_digits(cut(v), cut(used), cut(digits.values), axis="channels", size=of_values, slots=slots)
    return keys, values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCache:
    """A compressed cache during decoding."""

    k: Float[Array, "B #K P H"] | Quantized = field(metadata=_POOL)
    v: Float[Array, "B #K P H"] | Quantized = field(metadata=_POOL)
    # Index in the prompt of the token that was last written to each slot; -1: none, or a new token. If the cache has
    # been selected again, a new token has the padded length of the prompt plus its number.
    token: Int[Array, "B #K P"] = field(metadata=_POOL)
    start: Int[Array, "L B K"] = field(metadata=_TABLE)  # first slot of each layer's segment, in each part
    # Slots of each segment that may be read, in all parts together: its prompt entries, vision first, then text; or all
    # its slots if slots are reused.
    extent: Int[Array, "L B K"] = field(metadata=_TABLE)
    # None if slots are reused, or if no layer has a segment.
    tail_k: Float[Array, "B K L S H"] | QuantizedPool | None = field(metadata=_TAIL)
    tail_v: Float[Array, "B K L S H"] | QuantizedPool | None = field(metadata=_TAIL)
    # Number of new tokens so far, or since the last selection.
    used: Int[Array, " B"] = field(metadata=axes("batch"))
    next_position: Int[Array, "B A"] = field(metadata=axes("batch"))  # counts all tokens, including dropped ones
    # Long-RoPE: number of positions for which each row's keys have been rotated; see `decoder.rope.position_limit`.
    position_limit: Int[Array, " B"] | None = field(default=None, metadata=axes("batch"))
    rings: Rings | None = None  # of the layers with a sliding window, which have no segment; None: there are none
    states: tuple[State, ...] = ()  # of the layers with a recurrence, which have no segment either
    decode_states: DecodeState | None = None  # of all layers, arrays [L, B, ...], for methods that update the cache
    reselection: Reselection | None = None  # None: the entries are not selected again
    # Ids of all tokens of each row, see `generation/rules.py`; None: no rule that the cache was made for reads them.
    history: Int[Array, "B _s"] | None = field(default=None, metadata=axes("batch"))
    policy: Updater | None = field(default=None, metadata={"static": True})  # the method that updates `decode_states`
    softmax_n: float = field(default=0.0, metadata={"static": True})  # of decode attention
    kernels: Kernels = field(default=Kernels(), metadata={"static": True})  # implementations of the ops
    parts: int = field(default=1, metadata={"static": True})  # M
    longest: int | None = field(default=None, metadata={"static": True})  # bound on `extent`; None: P
    # KIVI: number of newest tokens that attention sees unquantised (see `quantize_old`); None: all of them.
    full_precision: int | None = field(default=None, metadata={"static": True})

    @property
    def entry_arrays(self) -> list[Array]:
        """All arrays that grow with the number of entries, and the states of recurrent layers.

        These are keys, values, scales of a quantised pool, the token of every slot, the decode state, and the rings.
        """
        return [x for x, names in leaves_with_axes(self) if {"slots", "entries", "ring", "state"} & set(names)]

    @property
    def bytes(self) -> int:
        """Allocated bytes of `entry_arrays`."""
        return sum(x.size * x.dtype.itemsize for x in self.entry_arrays)  # works for ShapeDtypeStructs too

    @property
    def kept(self) -> dict[str, Any]:
        """Keys, values and states by their part of the cache: `pool`, `tail`, `rings` and `states`."""
        rings = () if self.rings is None else self.rings.layers
        return {
            "pool": (self.k, self.v),
            "tail": (self.tail_k, self.tail_v),
            "rings": [(ring.k, ring.v) for ring in rings],
            "states": self.states,
        }

    @property
    def whole_axes(self) -> tuple[str, ...]:
        """Axes that no mesh splits."""
        return ("slots",) if self.parts == 1 else ("kv_heads",)

    @property
    def reuses(self) -> bool:
        """Whether new entries take free slots of the pool instead of a tail."""
        return self.decode_states is not None and self.decode_states.reuses

    @property
    def one_by_one(self) -> bool:
        """Whether new tokens are processed one after the other, because each one changes what the next attends to."""
        return self.decode_states is not None or self.full_precision is not None

    @property
    def new_tokens(self) -> int:
        """Capacity for tokens after the prompt, including those in `used`."""
        if self.reselection is not None:
            return UNLIMITED
        if self.rings is not None:  # a tail may have more, because its slots are rounded up to M equal parts
            return self.rings.new_tokens
        if self.decode_states is not None:
            return self.decode_states.new_tokens
        assert self.tail_k is not None
        return self.tail_k.shape[3]

    @property
    def slots(self) -> int:
        """Slots of a row and key head, in pool, tails and rings."""
        _, columns, slots = self.token.shape
        rings = () if self.rings is None else self.rings.layers
        tails = 0 if self.tail_k is None else math.prod(self.tail_k.shape[2:4])
        outside_pool = tails + sum(ring.slots for ring in rings)
        return slots * columns // self.start.shape[2] + outside_pool

    @property
    def counts(self) -> Int[Array, "L B K"]:
        """Number of stored entries of each segment."""
        if self.decode_states is None:  # without a decode state, every slot of a segment has an entry
            return self.extent
        stored = self.decode_states.stored
        return jnp.sum(stored[..., : stored.shape[-1] - self.decode_states.tail], axis=-1)

    def segment(self, layer: int | Int[Array, ""]) -> tuple[Array | Quantized, Array | Quantized, Array, Array]:
        """Keys and values of the pool, and [B, K] start and extent of a layer's segment."""
        return self.k, self.v, self.start[layer], self.extent[layer]

    def entries(self, layer: int, most: int) -> Int[Array, "B K most"]:
        """The prompt token of each of the first `most` entries of a layer; see the function `entries`."""
        return entries(self.token, self.start[layer], self.extent[layer], most, self.parts)


def entries(
    token: Int[Array, "B #K P"], start: Int[Array, "B K"], extent: Int[Array, "B K"], most: int, parts: int = 1
) -> Int[Array, "B K most"]:
    """The prompt token of each of the first `most` entries of a layer's segment, in order; -1: none, or a new token.

    An entry evicted while decoding is included until its slot is reused; `DecodeState.stored` excludes it.

    Args:
        token: field of a `PackedCache`.
        start: the field's entry for the layer.
        extent: the field's entry for the layer.
        most: bound on the number of entries.
        parts: field of the same cache.
    """
    number = jnp.arange(most)
    slot = slot_of(number, start[..., None], token.shape[2], parts)
    prompt_token = jnp.take_along_axis(token, slot, axis=2, mode="clip")
    return jnp.where(number < extent[..., None], prompt_token, -1)


@partial(jax.jit, static_argnames="kernels")  # traced once for all layers
def swap_pools(
    k: Float[Array, "B K P H"],
    v: Float[Array, "B K P H"],
    token: Int[Array, "B K P"],
    pairs: decode_state.Pairs,
    start: Int[Array, "B K"],
    kernels: Kernels,
) -> tuple[Float[Array, "B K P H"], Float[Array, "B K P H"], Int[Array, "B K P"]]:
    """Exchanges entries of a layer in keys, values and tokens. Its segments begin at the same slot in all heads."""

    def local(part: Part, pools: Any, token: Array, first: Array, second: Array, count: Array) -> Any:
        pools = swap_slots(pools, first, second, count, implementation=kernels.swap_slots)
        return *pools, *swap_slots((token,), first, second, count, implementation="xla")

    pool, pair = "B K P H", "B M"
    run = split(
        local, ((pool, pool), "B K P", pair, pair, "B"), (pool, pool, "B K P"), batch=k.shape[0], kv_heads=k.shape[1]
    )
    return run((k, v), token, start[:, :1] + pairs.first, start[:, :1] + pairs.second, pairs.number)


def take_rows(cache: PackedCache, rows: Sequence[int] | Int[np.ndarray, " R"] | Int[Array, " R"]) -> PackedCache:
    """A cache with the given rows of `cache`, in this order. Repeat a row to ask several questions about it.

    Args:
        cache: a cache of B rows.
        rows: numbers from 0 to B - 1.

    Raises:
        InputError: no rows; outside jit, also numbers out of range.
    """
    batch = cache.used.shape[0]
    if not isinstance(rows, jax.core.Tracer):
        known = np.asarray(rows)
        if known.ndim != 1 or not known.size or not np.issubdtype(known.dtype, np.integer):
            raise InputError(f"rows={rows!r} must be a list of at least one whole number")
        if known.min() < 0 or known.max() >= batch:
            raise InputError(f"rows={known.tolist()}: the cache has {batch} rows, numbered from 0")
    index = jnp.asarray(rows, jnp.int32)

    return map_with_axes(lambda x, names: jnp.take(x, index, axis=names.index("batch")), cache)


def checked_new_tokens(new_tokens: int | np.integer) -> int:
    """Returns `new_tokens` as Python's number; raises InputError unless it is a whole number of at least 1."""
    if not (isinstance(new_tokens, int | np.integer) and new_tokens >= 1):
        raise InputError(
            f"new_tokens={new_tokens!r} must be a whole number of at least 1: every new token needs a slot"
        )
    return int(new_tokens)


def most_used(cache: PackedCache) -> int | None:
    """The largest number of new tokens of any row; None under jit, where it is unknown."""
    if isinstance(cache.used, jax.core.Tracer):
        return None
    with jax.ensure_compile_time_eval():
        return int(jnp.max(cache.used))


def own_buffers(cache: PackedCache, other: Any) -> PackedCache:
    """Copies arrays that the cache contains twice or shares with a pytree, so that the cache can be donated."""
    seen = {id(x) for x in jax.tree.leaves(other)}

    def unshared(x: Array) -> Array:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(unshared, cache)
