"""Attention of new tokens to a layer of a cache: to its segment of the pool, and to its tail.

Axes: as in `decode_state.py` and `pool.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import Kernels, Quantized, core_attention, decode_attention
from pallas_kernels.dispatch import target_platform
from vlkv.cache.decode_state import DecodeState
from vlkv.cache.parts import Part, split

_SHORT = 128  # slots of a tail that are one block of attention on a CPU


class Tail(NamedTuple):
    """The tails of all layers, and the number of the layer that is read: slicing would copy a long tail."""

    k: Any  # [B, K, L, S, H], perhaps quantised
    v: Any
    layer: int | Int[Array, ""]

    @classmethod
    def axes(cls) -> Tail:
        """The axes for `split`."""
        return cls("B K L P H", "B K L P H", "")  # type: ignore[arg-type]

    def local(self) -> tuple[Any, Any, int | Int[Array, ""], int]:
        """Keys and values as a pool of a device [B, K, L S, H], the first slot of the layer in it, and its size S.

        On a CPU, the pool of a short tail has only this layer: in a loop over the layers, XLA copies it faster than it
        gathers slots whose places are not constant.
        """
        tail, size = self, self.k.shape[3]
        if size <= _SHORT and target_platform() == "cpu":
            k, v = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, self.layer, 1, 2), (self.k, self.v))
            tail = Tail(k, v, 0)
        k, v = (jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), pool) for pool in tail[:2])
        return k, v, tail.layer * size, size


@partial(jax.jit, static_argnames=("softmax_n", "parts", "longest", "implementation"))
def cached_attention(
    q: Float[Array, "B T N H"],
    segment: tuple[Any, Any, Int[Array, "B K"], Int[Array, "B K"]],
    tail: Tail,
    tail_count: Int[Array, "B T"],
    *,
    softmax_n: float = 0.0,
    parts: int = 1,
    longest: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of one or more queries of each row to a segment and to the tail, in float32.

    Args:
        q: queries.
        segment: keys and values of the pool, start and length of a layer's segment.
        tail: the tail of the layer.
        tail_count: number of tail entries that each query attends to.
        softmax_n: n of n-softmax over segment and tail together.
        parts: M of the cache.
        longest: static bound on the length of the segment; None: the slots of the pool.
        implementation: of `decode_attention`.
    """

    def local(part: Part, q: Array, segment: tuple, tail: Tail, tail_count: Array) -> Array:
        k, v, start, length = segment
        tail_k, tail_v, first, most = tail.local()
        tail_start, length = jnp.full_like(start, first), part.local_count(length)

        def attend_one_query(q: Array, tail_count: Array) -> Array:
            attend = partial(decode_attention, q, implementation=implementation)
            of_segment = attend(k, v, start, length, max_length=longest)
            tail_length = jnp.broadcast_to(part.local_count(tail_count)[:, None], start.shape)
            of_tail = attend(tail_k, tail_v, tail_start, tail_length, max_length=most)
            return part.combine(of_segment, of_tail, softmax_n=softmax_n)[0]

        if q.shape[1] == 1:
            return attend_one_query(q[:, 0], tail_count[:, 0])[:, None]
        return jax.vmap(attend_one_query, in_axes=1, out_axes=1)(q, tail_count)

    pool = "B K P H"
    axes = "B T N H", (pool, pool, "B K", "B K"), Tail.axes(), "B T"
    run = split(local, axes, "B T N H", batch=q.shape[0], kv_heads=tail.k.shape[1], parts=parts)
    return run(q, segment, tail, tail_count)


@partial(jax.jit, static_argnames=("softmax_n", "kernels", "parts"))
def attend_to(
    q: Float[Array, "B N H"],
    segment: tuple[Array | Quantized, Array | Quantized, Array, Array],
    tail: Tail | None,
    tail_count: Int[Array, " B"],
    state: DecodeState,
    *,
    softmax_n: float = 0.0,
    kernels: Kernels | None = None,
    parts: int = 1,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N E"]]:
    """Attention of one query to the entries `state.attended`; also returns the share that each of them receives.

    Args:
        q: queries of this step.
        segment: keys and values of the pool, start and length of this layer's segment.
        tail: of this layer; None: slots are reused.
        tail_count: number of entries in the tail.
        state: the decode state after `arrive`.
        softmax_n: n of n-softmax over segment and tail together.
        kernels: implementations; None: those of the platform.
        parts: as in `PackedCache`.
    """
    kernels = Kernels() if kernels is None else kernels
    in_segment = state.stored.shape[-1] - state.tail  # number of entries
    mask, tail_mask = state.attended[..., :in_segment], state.attended[..., in_segment:]
    k, v, start, length = segment
    if tail is None:  # slots are reused, so `length` is all of them: those after the last attended entry are not read
        length = jnp.max(jnp.where(mask, jnp.arange(1, in_segment + 1), 0), axis=-1)
    core = () if state.core is None else jax.vmap(_core_list)(state)
    pool, entries = "B K P H", "B K E"
    tail_axes = None if tail is None else (Tail.axes(), "B", entries)
    axes = "B N H", (pool, pool, "B K", "B K", entries), tail_axes, ("B C", "B", "B K", "B") if core else ()
    local = partial(_attend_part, softmax_n=softmax_n, kernels=kernels, entries=(in_segment, state.tail))
    run = split(local, axes, ("B N H", entries), batch=q.shape[0], kv_heads=mask.shape[1], parts=parts)
    return run(q, (k, v, start, length, mask), None if tail is None else (tail, tail_count, tail_mask), core)


def _attend_part(
    part: Part,
    q: Array,
    segment: tuple[Any, ...],
    tail: tuple[Any, ...] | None,
    core: tuple[Array, ...],
    *,
    entries: tuple[int, int],
    softmax_n: float,
    kernels: Kernels,
) -> tuple[Array, Array]:
    """`attend_to` for the part of one device. `entries` are those of the whole segment and of the whole tail."""
    pieces: list[tuple[Array, ...]] = [_attend_to_segment(part, q, segment, core, kernels)]
    if tail is not None:
        (k, v, first, most), count = tail[0].local(), part.local_count(tail[1])[:, None]
        where = k, v, jnp.full_like(segment[2], first), jnp.broadcast_to(count, segment[2].shape)
        options: Any = {"valid": part.local_entries(tail[2]), "max_length": most, "return_mass": True}
        pieces.append(decode_attention(q, *where, implementation=kernels.decode_attention, **options))
    outputs = [(out, lse) for out, lse, _ in pieces]
    out, total = part.combine(outputs[0], outputs[1] if tail is not None else None, softmax_n)
    shares = [
        part.gather_entries(mass * jnp.exp(lse - total)[..., None], size)
        for (_, lse, mass), size in zip(pieces, entries, strict=False)  # without a tail, there is one piece
    ]
    return out, jnp.concatenate(shares, axis=-1)


def _attend_to_segment(
    part: Part, q: Array, segment: tuple[Any, ...], core: tuple[Array, ...], kernels: Kernels
) -> tuple[Array, ...]:
    """Output, log-sum-exp and mass of attention to a segment, or only to the listed core if all rows allow it."""
    k, v, start, length, mask = segment
    mask = part.local_entries(mask)
    pool, options = (q, k, v, start), dict[str, Any](valid=mask, max_length=mask.shape[-1], return_mass=True)
    count = part.local_count(length)

    def attend_to_all() -> tuple[Array, ...]:
        return decode_attention(*pool, count, implementation=kernels.decode_attention, **options)

    def attend_to_core() -> tuple[Array, ...]:
        offsets, number = part.listed(*core[:2])
        text = part.local_count(core[2])
        return core_attention(*pool, count, offsets, number, text, implementation=kernels.core_attention, **options)

    if not core:
        return attend_to_all()
    # After `extend`, rows may be at different steps; then all rows use the whole segment.
    return jax.lax.cond(jnp.all(core[3]), attend_to_core, attend_to_all)


def _core_list(state: DecodeState) -> tuple[Array, Array, Array, Array]:
    """Core entries of a row, their number and the first text slot for `core_attention`, and whether it can be used.

    The list of core entries must be the same for all heads. Heads may differ if another method selects the
    stored entries. Then every step reads the whole segment with the mask `attended`, which has the same result.
    """
    assert state.core is not None and state.core_only is not None
    inside = slice(0, state.stored.shape[1] - state.tail)
    text = state.is_text[:, inside]
    vision = state.core[:, inside] & ~text
    (offsets,) = jnp.nonzero(vision[0], size=vision.shape[1], fill_value=0)
    first = jnp.where(jnp.any(text, axis=1), jnp.argmax(text, axis=1), vision.shape[1])  # vision comes first
    return (
        offsets.astype(jnp.int32), jnp.sum(vision[0], dtype=jnp.int32), first.astype(jnp.int32),
        state.core_only & jnp.all(vision == vision[0]),
    )  # fmt: skip
