"""The decode state of methods that evict or select entries while decoding, and attention that returns the share of
each entry.

If a method evicts, a new entry takes a free slot, chosen by `arrive` for each key head, so the cache does not grow. If
`reuses` is False (the pool is quantised, or nothing is evicted), new entries go to a tail, and an evicted entry is
masked and its slot is not used again.

Unbatched; the caller applies vmap over B. Axes: K key heads · N query heads · T prompt tokens · S slots of the tail, if
there is one · E slots: those of the segment, up to a static bound, then those of the tail. The number of an entry is
the index of its slot on this axis. A slot is free if `stored` is False; its old contents stay until it is reused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.slots import TILE
from vlkv.sharding.placement import axes

# Of the arrays in a cache, which have the axis L of its layers first.
_ENTRIES, _HEADS = axes(None, "batch", "kv_heads", "entries"), axes(None, "batch", "kv_heads")
_ROWS = axes(None, "batch")
_LAST = jnp.iinfo(jnp.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """The decode state of one layer and row, or of all layers and rows (*B: L B).

    `place`, `rank` and `values` have no meaning in slots without an entry.
    """

    stored: Bool[Array, "*B K E"] = field(metadata=_ENTRIES)  # the slot contains an entry
    attended: Bool[Array, "*B K E"] = field(metadata=_ENTRIES)  # the next token attends to it, and to itself as well
    is_text: Bool[Array, "*B K E"] = field(metadata=_ENTRIES)  # False: the slot holds, or last held, a vision token
    place: Int[Array, "*B K E"] = field(metadata=_ENTRIES)  # the token's number among all valid tokens, from 0
    rank: Int[Array, "*B K E"] = field(metadata=_ENTRIES)  # number of stored entries that are older
    values: dict[str, Float[Array, "*B K E"]] = field(metadata=_ENTRIES)  # from `DecodingStages.decode_values`
    slots: Int[Array, "*B K"] = field(metadata=_HEADS)  # number of slots for entries
    budget: Int[Array, "*B K"] = field(metadata=_HEADS)  # number of kept prompt entries: the budget of `step`
    vision: Int[Array, "*B"] = field(metadata=_ROWS)  # number of vision tokens of the prompt
    text: Int[Array, "*B"] = field(metadata=_ROWS)  # number of text tokens of the prompt
    steps: Int[Array, "*B"] = field(metadata=_ROWS)  # number of new tokens so far
    # Number of tokens in scope that the layer may keep: those of which `keep` is a fraction. If another policy has
    # reduced the prompt, these are the tokens that it has left.
    counted: Int[Array, "*B"] = field(metadata=_ROWS)
    # For methods with steps that attend only to a core of the stored vision entries and to all text: this core, and
    # whether the next step is such a step. It does not read the other entries.
    core: Bool[Array, "*B K E"] | None = field(default=None, metadata=_ENTRIES)
    core_only: Bool[Array, "*B"] | None = field(default=None, metadata=_ROWS)
    new_tokens: int = field(metadata={"static": True})  # capacity for tokens after the prompt
    reuses: bool = field(default=False, metadata={"static": True})  # whether new entries take free slots

    @property
    def tail(self) -> int:
        """Number of tail slots S."""
        return 0 if self.reuses else self.new_tokens


def begin(
    kept: Bool[Array, "K T"],
    values: dict[str, Float[Array, "K T"]],
    is_vision: Bool[Array, " T"],
    valid: Bool[Array, " T"],
    counted: Int[Array, ""],
    *,
    new_tokens: int,
) -> DecodeState:
    """The decode state of a layer before packing, with an entry for every token of the prompt."""
    count = jnp.sum(kept, axis=-1, dtype=jnp.int32)
    return DecodeState(
        stored=kept,
        attended=kept,
        is_text=jnp.broadcast_to(~is_vision, kept.shape),
        place=jnp.broadcast_to(jnp.cumsum(valid) - 1, kept.shape).astype(jnp.int32),
        rank=(jnp.cumsum(kept, axis=-1) - kept).astype(jnp.int32),
        values=values,
        slots=count,
        budget=count,
        vision=jnp.sum(is_vision & valid),
        text=jnp.sum(valid & ~is_vision),
        steps=jnp.int32(0),
        counted=counted,
        new_tokens=new_tokens,
        reuses=True,  # no tail yet; `packed` may add one
    )


def packed(
    state: DecodeState, token: Int[Array, "K segment"], slots: Int[Array, " K"], *, new_tokens: int, reuses: bool
) -> DecodeState:
    """The decode state after packing.

    Args:
        state: with an entry for every token of the prompt.
        token: token in each slot of the segment; -1: none. See `cache.entries`.
        slots: number of slots of the segment.
        new_tokens: capacity for new tokens; S, if there is a tail.
        reuses: whether slots are reused, so that there is no tail.
    """
    present, index = token >= 0, jnp.maximum(token, 0)

    def fit(x: Any, fill: Any) -> Any:
        return (
            None if x is None else jnp.where(present, jnp.take_along_axis(x, index, axis=1), jnp.asarray(fill, x.dtype))
        )

    state = _each(state, fit)
    if reuses:
        return dataclasses.replace(state, slots=slots, new_tokens=new_tokens)
    state = dataclasses.replace(state, slots=jnp.full_like(slots, token.shape[1]), new_tokens=0, reuses=False)
    return resize(state, new_tokens)


def _each(state: DecodeState, change: Any) -> DecodeState:
    """Applies `change(x, fill)` to every array with the axis E; `fill` is the value of an empty entry."""
    return dataclasses.replace(
        state,
        **{name: change(getattr(state, name), False) for name in ("stored", "attended", "core")},
        **{name: change(getattr(state, name), 0) for name in ("place", "rank")},
        is_text=change(state.is_text, True),
        values={name: change(value, 0.0) for name, value in state.values.items()},
    )


def resize(state: DecodeState, new_tokens: int, more: int = 0) -> DecodeState:
    """The decode state with another capacity for new tokens; of one layer and row, or of all.

    Args:
        state: the decode state.
        new_tokens: the new capacity, including tokens so far.
        more: additional slots of the segment, if slots are reused.
    """
    more = more if state.reuses else new_tokens - state.new_tokens
    size = state.stored.shape[-1] + more

    def fit(x: Any, fill: Any) -> Any:
        if x is None:
            return None
        empty = jnp.broadcast_to(jnp.asarray(fill, x.dtype), (*x.shape[:-1], max(0, more)))
        return jnp.concatenate([x[..., :size], empty], axis=-1)

    slots = state.slots if state.reuses else state.slots + more
    return dataclasses.replace(_each(state, fit), slots=slots, new_tokens=new_tokens)


def arrive(state: DecodeState) -> tuple[DecodeState, Int[Array, " K"]]:
    """Reserves a stored and attended entry for the new token; also returns its entry number in each head.

    The caller writes keys and values. If slots are reused, the entry takes a free slot. If there is none, because the
    method has evicted nothing, the oldest entry is evicted.
    """
    size = state.stored.shape[-1]
    number = jnp.arange(size)
    if state.reuses:
        preference = jnp.where(state.stored, 1 + state.rank, 0)  # free slots, then the oldest entry
        entry = jnp.argmin(jnp.where(number < state.slots[:, None], preference, _LAST), axis=-1)
    else:
        entry = jnp.full_like(state.slots, size - state.tail + state.steps)
    new = number == entry[:, None]
    state = _remove(state, new & state.stored)
    return dataclasses.replace(
        state,
        stored=state.stored | new,
        attended=state.attended | new,
        is_text=state.is_text | new,
        place=jnp.where(new, state.vision + state.text + state.steps, state.place),
        rank=jnp.where(new, jnp.sum(state.stored, axis=-1, keepdims=True), state.rank),
        values={name: jnp.where(new, 0.0, value) for name, value in state.values.items()},
        core=None if state.core is None else state.core & ~new,
        steps=state.steps + 1,
    ), entry


def evictable(state: DecodeState, recent: Int[Array, " K"]) -> Bool[Array, "K E"]:
    """All entries but the `recent` newest ones, in heads with more entries than their budget, or without free slots."""
    count = jnp.sum(state.stored, axis=-1)
    budget = jnp.minimum(state.budget, state.slots - 1) if state.reuses else state.budget
    recent = jnp.minimum(recent, budget)
    return state.stored & (state.rank < (count - recent)[:, None]) & (count > budget)[:, None]


def mean_over_heads(state: DecodeState, x: Float[Array, "K E"]) -> Float[Array, "K E"]:
    """The mean over the heads of a number of each entry's token, which is 0 in heads that do not hold the token.

    Equal slots hold equal tokens only if all heads have kept the same ones. Otherwise entries are grouped by token.
    """
    heads, token = len(x), jnp.where(state.stored, state.place, -1)

    # Gives every entry the sum of x over the entries of its token in all heads.
    def group(todo: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        x, token, _ = todo
        order = jnp.argsort(token)
        number = jnp.cumsum(jnp.diff(token[order], prepend=token[order][:1]) != 0)
        sums = jax.ops.segment_sum(x[order], number, len(x), indices_are_sorted=True)
        x, token = jnp.zeros_like(x).at[order].set(sums[number]), jnp.zeros_like(token).at[order].set(number)
        return x, token, jnp.zeros_like(todo[2])

    aligned = jnp.all(token == token[0])
    x = jnp.where(state.stored, x, 0.0)
    x = jnp.where(aligned, jnp.sum(x, axis=0), x)
    # A loop of one or no iteration, because under vmap a condition would always compute both of its branches.
    total, *_ = jax.lax.while_loop(lambda todo: todo[2], group, (x.reshape(-1), token.reshape(-1), ~aligned))
    return total.reshape(x.shape) / heads


def evict(state: DecodeState, candidates: Bool[Array, "K E"], value: Float[Array, "K E"]) -> DecodeState:
    """Evicts in every head the candidate with the least value (ties: the oldest), or nothing without candidates."""
    least = jnp.min(jnp.where(candidates, value, jnp.inf), axis=-1, keepdims=True)
    tied = candidates & (value == least)
    oldest = jnp.argmin(jnp.where(tied, state.rank, _LAST), axis=-1)
    return _remove(state, tied & (jnp.arange(tied.shape[-1]) == oldest[:, None]))


def _remove(state: DecodeState, evicted: Bool[Array, "K E"]) -> DecodeState:
    """The decode state without these entries, at most one per head. Only `stored`, `attended` and `rank` change."""
    rank = jnp.min(jnp.where(evicted, state.rank, _LAST), axis=-1, keepdims=True)
    return dataclasses.replace(
        state,
        stored=state.stored & ~evicted,
        attended=state.attended & ~evicted,
        rank=state.rank - (state.rank > rank),
    )


class Pairs(NamedTuple):
    """Entries `first[b, i]` and `second[b, i]` to exchange in every head, for i < number[b]."""

    first: Int[Array, "B M"]
    second: Int[Array, "B M"]
    number: Int[Array, " B"]


@jax.jit
def group_core(state: DecodeState, may: Bool[Array, " B"]) -> tuple[DecodeState, Pairs]:
    """Exchanges entries so that the core fills the first tiles of the segment; batched.

    The caller exchanges the returned pairs in the pool. There are none until the core changes, and never in a row whose
    heads differ in their core or text.

    Args:
        state: the decode state, with a core.
        may: rows that may change.
    """
    assert state.core is not None
    inside = state.stored.shape[-1] - state.tail
    vision, text = (x[..., :inside] for x in (state.core & ~state.is_text, state.is_text))
    same = jnp.all((vision == vision[:, :1]) & (text == text[:, :1]), axis=(1, 2))
    vision, text, number = vision[:, 0], text[:, 0], jnp.arange(inside)
    size = -(-jnp.sum(vision, axis=-1, keepdims=True) // TILE) * TILE
    first, second = vision & (number >= size), ~vision & ~text & (number < size)
    count = jnp.where(may & same, jnp.sum(first, axis=-1, dtype=jnp.int32), 0)
    most = max(1, inside // 2)

    def exchange(state: DecodeState) -> tuple[DecodeState, Pairs]:
        a, b = (jax.vmap(lambda x: jnp.nonzero(x, size=most)[0].astype(jnp.int32))(x) for x in (first, second))
        pairs = Pairs(a, b, count)
        row, entries = jnp.arange(len(count))[:, None], state.stored.shape[-1]
        a, b = (jnp.where(jnp.arange(most) < count[:, None], x, entries) for x in (a, b))
        order = jnp.broadcast_to(jnp.arange(entries), (len(count), entries))
        order = order.at[row, a].set(b, mode="drop").at[row, b].set(a, mode="drop")[:, None]
        return _each(state, lambda x, _: None if x is None else jnp.take_along_axis(x, order, axis=2)), pairs

    none = jnp.zeros((len(count), most), jnp.int32)
    return jax.lax.cond(jnp.any(count > 0), exchange, lambda state: (state, Pairs(none, none, count)), state)


@runtime_checkable
class Updater(Protocol):
    """What the cache needs of a method that updates it while decoding (`vlkv.compression.policy.DecodingStages`)."""

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        """Updates the decode state after the attention of each step."""
        ...

    def decode_slots(self, state: DecodeState) -> Int[Array, " K"]:
        """The number of slots that the method requests for a segment, per key head."""
        ...

    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int] | None:
        """Bounds on the slots of all layers and of one layer; None: no entry is evicted."""
        ...
