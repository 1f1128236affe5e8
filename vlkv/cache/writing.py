"""Writes new entries to the tail or the pool, and quantises entries that have left KIVI's window.

Axes: as in `pool.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Kernels, QuantizedPool, dequantize, quantize, quantize_rotated, write_slots
from vlkv.cache.parts import Part, slot_of, split


def write_tail(
    tail: Float[Array, "B K L S H"] | QuantizedPool,
    layer: int | Int[Array, ""],
    new: Float[Array, "B T K H"],
    entry: Int[Array, "B T"],
    parts: int = 1,
    kernels: Kernels | None = None,
) -> Any:
    """Writes entries of one layer to the tail; quantises them if the tail is quantised.

    Args:
        tail: keys or values of all layers.
        layer: number of the layer among those with a tail.
        new: the entries.
        entry: their indices in the layer's tail; entries past its end are not written.
        parts: into which a mesh splits the slots.
        kernels: implementations; None: those of the platform.
    """
    slots = tail.shape[3]
    slot = jnp.where(entry < slots, slot_of(entry, 0, slots, parts), slots)
    if not isinstance(tail, QuantizedPool):
        return write_slot(tail, new, slot, parts, kernels, layer)
    stored = quantize_rotated(new.astype(tail.dtype), jnp.ones(new.shape[:3], bool), bits=tail.bits)
    return jax.tree.map(lambda x, y: write_slot(x, y, slot, parts, kernels, layer), tail, stored)


def of_layer(tail: Any, layer: int | Int[Array, ""]) -> Any:
    """The tail of one layer [B, K, S, H], a copy."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, 2, keepdims=False), tail)


def quantize_old(
    tail: tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]],
    tail_count: Int[Array, " B"],
    *,
    bits: int,
    group: int,
    window: int,
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Keys and values of a tail as attention reads them if KIVI has quantised those outside its window (its Alg. 1).

    Keys leave `window` at a time, so that their groups along the slots are complete; values leave one by one.

    Args:
        tail: keys and values in full precision.
        tail_count: entries of each row, the new one included.
        bits: see `quantize`.
        group: see `quantize`; it divides `window`.
        window: largest number of entries in full precision.
    """
    slot = jnp.arange(tail[0].shape[2])
    old = slot < (tail_count // window * window)[:, None], slot < (tail_count - window)[:, None]
    visible = []
    for x, is_old, axis in zip(tail, old, ("slots", "channels"), strict=True):
        used = jnp.broadcast_to(is_old[:, None], x.shape[:3])
        stored = dequantize(quantize(x, used, bits=bits, group=group, axis=axis))  # type: ignore[arg-type]
        visible.append(jnp.where(used[..., None], stored, x))
    return visible[0], visible[1]


def write_pool(
    pool: Float[Array, "B #K P *H"] | Int[Array, "B #K P"],
    new: Float[Array, "B T K *H"] | Int[Array, "B T K"],
    entry: Int[Array, "B T K"],
    start: Int[Array, "B T K"],
    valid: Bool[Array, "B 1"] | None = None,
    parts: int = 1,
    kernels: Kernels | None = None,
) -> Float[Array, "B #K P *H"] | Int[Array, "B #K P"]:
    """Writes entries to segments of the pool.

    Args:
        pool: keys, values or tokens.
        new: the entries, for each key head.
        entry: index of each entry in its segment.
        start: first slot of the segment.
        valid: rows to write; None: all.
        parts: into which a mesh splits the slots.
        kernels: implementations; None: those of the platform.
    """
    slots = pool.shape[2]
    slot = slot_of(entry, start, slots, parts)
    slot = slot if valid is None else jnp.where(valid[..., None], slot, slots)
    return write_slot(pool, new, slot, parts, kernels)


@partial(jax.jit, static_argnums=(3, 4))  # traced once for all layers
def write_slot(
    x: Array,
    new: Array,
    slot: Int[Array, "B T"] | Int[Array, "B T K"],
    parts: int = 1,
    kernels: Kernels | None = None,
    layer: int | Int[Array, ""] | None = None,
) -> Array:
    """Writes `new` [B, T, K, ...] to slots of x [B, #K, P, ...], or of one layer of x [B, K, L, S, ...].

    Slots past the end are ignored. `slot` is the same for all heads, or one for each.
    """
    pool, entries = (f"B {axes}" + " H" * (new.ndim - 3) for axes in ("K P" if layer is None else "K L P", "T K"))
    slot = jnp.broadcast_to(slot.reshape(*slot.shape[:2], -1), new.shape[:3])

    def local(part: Part, x: Array, new: Array, slot: Array) -> Array:
        size = x.shape[2 if layer is None else 3]
        slot, flat = part.local_slot(slot, size), x
        if layer is not None:
            flat = x.reshape(*x.shape[:2], -1, *x.shape[4:])
            slot = jnp.where(slot < size, layer * size + slot, flat.shape[2])
        return _write(flat, new, slot, kernels).reshape(x.shape)

    run = split(local, (pool, entries, "B T K"), pool, batch=x.shape[0], kv_heads=x.shape[1], parts=parts)
    return run(x, new, slot)


def _write(x: Array, new: Array, slot: Int[Array, "B T K"], kernels: Kernels | None) -> Array:
    """Writes to the slots of one device, with the op `write_slots` if there is one new entry per row."""
    if x.ndim == 4 and slot.shape[1] == 1:
        implementation = None if kernels is None else kernels.write_slots
        return write_slots(x, new[:, 0], slot[:, 0], implementation=implementation)
    row = jnp.arange(x.shape[0])[:, None, None]
    return x.at[row, jnp.arange(x.shape[1]), slot].set(new, mode="drop", wrap_negative_indices=False)
