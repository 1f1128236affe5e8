"""What a method that acts while decoding remembers of one layer's entries, and the attention that feeds it.

Unbatched like every stage: B is vmapped outside. Axes: K key heads · N query heads · M bound on the segment · S tail
slots · E = M + S entries, the segment's before the tail's. Evicting masks an entry; its slot is not reused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Kernels, QuantizedPool, core_attention, decode_attention
from vlkv import parallel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
    """The slots of a segment that some steps are content with, so that such a step need not read the others."""

    rows: Int[Array, "*B M"]  # ascending, counted from the segment's start; from `count` on anything
    count: Int[Array, "*B"]
    text: Int[Array, "*B K"]  # the segment's first slot of text; all from there on takes part
    suffices: Bool[Array, "*B"]  # whether the next step attends to nothing else in the segment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """One layer of one row."""

    stored: Bool[Array, "*B K E"]  # in memory
    attended: Bool[Array, "*B K E"]  # what the next step attends to, besides its own entry
    is_text: Bool[Array, "*B K E"]  # prompt text and generated tokens
    place: Int[Array, "*B K E"]  # order in which tokens were seen, from 0
    values: dict[str, Float[Array, "*B K E"]]  # the method's own numbers, from `Policy.remember`
    capacity: Int[Array, "*B K"]  # prompt entries that were kept
    vision: Int[Array, "*B"]  # vision tokens that the prompt had
    text: Int[Array, "*B"]  # text tokens that the prompt had
    steps: Int[Array, "*B"]  # tokens fed so far
    core: Core | None = None  # for methods with steps that do not attend to all that is stored; see `list_core`
    new_tokens: int = dataclasses.field(metadata={"static": True})  # S


def begin(
    token: Int[Array, "K M"],
    length: Int[Array, " K"],
    values: dict[str, Float[Array, "K T"]],
    is_vision: Bool[Array, " T"],
    valid: Bool[Array, " T"],
    *,
    new_tokens: int,
) -> Memory:
    """The memory of a packed segment: values of kept tokens, zeros for the tail to come; `token` of `cache.entries`."""
    inside, tokens = token >= 0, jnp.maximum(token, 0)
    heads, count = tokens.shape[0], jnp.sum(valid)

    def extend(x: Array, fill: Array | float) -> Array:
        return jnp.concatenate([x, jnp.broadcast_to(jnp.asarray(fill, x.dtype), (heads, new_tokens))], axis=1)

    stored = extend(inside, False)
    return Memory(
        stored=stored,
        attended=stored,
        is_text=extend(inside & ~is_vision[tokens], True),
        place=extend((jnp.cumsum(valid) - 1)[tokens].astype(jnp.int32), count + jnp.arange(new_tokens)),
        values={
            name: extend(jnp.where(inside, jnp.take_along_axis(value, tokens, axis=1), 0.0), 0.0)
            for name, value in values.items()
        },
        capacity=length,
        vision=jnp.sum(is_vision & valid),
        text=jnp.sum(valid & ~is_vision),
        steps=jnp.int32(0),
        new_tokens=new_tokens,
    )


def resize(memory: Memory, new_tokens: int) -> Memory:
    """The same for a tail of another size, batched or not: new slots are empty and come next in order."""
    size = memory.stored.shape[-1] - memory.new_tokens + new_tokens
    more = max(0, new_tokens - memory.new_tokens)

    def fit(x: Array, fill: Array | bool | float) -> Array:
        empty = jnp.broadcast_to(jnp.asarray(fill, x.dtype), (*x.shape[:-1], more))
        return jnp.concatenate([x[..., :size], empty], axis=-1)

    return dataclasses.replace(
        memory,
        stored=fit(memory.stored, False),
        attended=fit(memory.attended, False),
        is_text=fit(memory.is_text, True),
        place=fit(memory.place, memory.place[..., -1:] + 1 + jnp.arange(more)),
        values={name: fit(value, 0.0) for name, value in memory.values.items()},
        new_tokens=new_tokens,
    )


def arrive(memory: Memory) -> Memory:
    """The entry of the token that is being fed: stored, attended to."""
    slot = memory.stored.shape[-1] - memory.new_tokens + memory.steps
    return dataclasses.replace(
        memory,
        stored=memory.stored.at[:, slot].set(True),
        attended=memory.attended.at[:, slot].set(True),
        steps=memory.steps + 1,
    )


def list_core(memory: Memory, core: Bool[Array, "K E"], suffices: Bool[Array, ""]) -> Memory:
    """Says which entries the next step attends to in the segment, besides text: `core` if it `suffices`, or any.

    One list serves all heads. Where heads differ, as they may if another method chose what is stored, every step reads
    the whole segment and masks it by `attended`, which is the same in effect.
    """
    inside = slice(0, core.shape[1] - memory.new_tokens)
    text, vision = memory.is_text[:, inside], core[:, inside] & ~memory.is_text[:, inside]
    (rows,) = jnp.nonzero(vision[0], size=vision.shape[1], fill_value=0)
    made = Core(
        rows=rows.astype(jnp.int32),
        count=jnp.sum(vision[0], dtype=jnp.int32),
        # Vision comes first in a segment; evicted text keeps its slot.
        text=jnp.where(jnp.any(text, axis=1), jnp.argmax(text, axis=1), memory.capacity).astype(jnp.int32),
        suffices=suffices & jnp.all(vision == vision[0]),
    )
    return dataclasses.replace(memory, core=made)


def attend_to(
    q: Float[Array, "B N H"],
    segment: tuple[Array | QuantizedPool, Array | QuantizedPool, Array, Array],
    tail: tuple[Array, Array],
    seen: Int[Array, " B"],
    memory: Memory,
    *,
    softmax_n: float = 0.0,
    kernels: Kernels | None = None,
    parts: int = 1,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N E"]]:
    """Attention over what the memory says, and the share of it that every entry received. Batched.

    Args:
        q: this step's queries.
        segment: keys and values of the pool, start and length of this layer's segment.
        tail: keys and values of this layer's tail.
        seen: its entries.
        memory: after `arrive`.
        softmax_n: of n-softmax, counted once for segment and tail together.
        kernels: implementations; None: of the platform.
        parts: of the cache's slots.
    """
    new_tokens, kernels = memory.new_tokens, Kernels() if kernels is None else kernels
    kept, recent = memory.attended[..., :-new_tokens], memory.attended[..., -new_tokens:]
    held = memory.core
    core = () if held is None else (held.rows, held.count, held.text, held.suffices)

    def own(
        part: parallel.Part, q: Array, segment: Any, tail: Any, seen: Array, kept: Array, recent: Array, core: Any
    ) -> tuple[Array, ...]:
        """A device's rows, heads and slots."""
        (k, v, start, length), (tail_k, tail_v) = segment, tail
        nothing = jnp.zeros_like(start)
        kept, recent = part.mine(kept), part.mine(recent)
        here = q, k, v, start, part.number(length)
        most = kept.shape[-1]

        def whole() -> tuple[Array, Array, Array]:
            return decode_attention(
                *here, valid=kept, max_length=most, return_mass=True, implementation=kernels.decode_attention
            )

        def listed() -> tuple[Array, Array, Array]:
            rows, count = part.listed(*core[:2])
            return core_attention(
                *here, rows, count, part.number(core[2]), valid=kept, max_length=most, return_mass=True,
                implementation=kernels.core_attention,
            )  # fmt: skip

        if not core:
            out, lse, mass = whole()
        else:  # after `extend` rows may be at different steps: then all read the whole
            out, lse, mass = jax.lax.cond(jnp.all(core[-1]), listed, whole)
        tail_out, tail_lse, tail_mass = decode_attention(
            q, tail_k, tail_v, nothing, nothing + part.number(seen)[:, None], valid=recent,
            max_length=recent.shape[-1], return_mass=True, implementation=kernels.decode_attention,
        )  # fmt: skip
        out, total = part.combine((out, lse), (tail_out, tail_lse), softmax_n=softmax_n)
        shares = mass * jnp.exp(lse - total)[..., None], tail_mass * jnp.exp(tail_lse - total)[..., None]
        sizes = memory.attended.shape[-1] - new_tokens, new_tokens
        whole_shares = [part.all(x, size) for x, size in zip(shares, sizes, strict=True)]
        return out, jnp.concatenate(whole_shares, axis=-1)

    pool, mask, listed = "B P K H", "B K E", ("B C", "B", "B K", "B")
    run = parallel.split(
        own, ("B N H", (pool, pool, "B K", "B K"), (pool, pool), "B", mask, mask, listed if core else ()),
        ("B N H", "B N E"), batch=q.shape[0], kv_heads=kept.shape[1], parts=parts,
    )  # fmt: skip
    return run(q, segment, tail, seen, kept, recent, core)


def evict(memory: Memory, candidates: Bool[Array, "K E"], value: Float[Array, "K E"]) -> Memory:
    """Masks, in every head, the candidate of the least value; ties go to the earlier slot. None: nothing happens."""
    worst = jnp.argmin(jnp.where(candidates, value, jnp.inf), axis=-1)
    gone = jax.nn.one_hot(worst, candidates.shape[-1], dtype=bool) & candidates
    return dataclasses.replace(memory, stored=memory.stored & ~gone, attended=memory.attended & ~gone)


def rank_by_place(memory: Memory, among: Bool[Array, "K E"]) -> Int[Array, "K E"]:
    """For every entry the number of entries `among` that were seen before it."""
    order = jnp.argsort(jnp.where(among, memory.place, jnp.iinfo(jnp.int32).max), axis=-1)
    before = jnp.broadcast_to(jnp.arange(order.shape[-1]), order.shape)
    return jnp.put_along_axis(jnp.zeros_like(order), order, before, axis=-1, inplace=False)
