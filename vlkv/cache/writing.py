"""Writes new entries to the tail or the pool, and quantises what leaves KIVI's window.

Axes: as in `pool.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Kernels, QuantizedPool, dequantize, quantize, quantize_rotated, write_slots
from vlkv.sharding import ops


def write_tail(
    tail: Float[Array, "B K S H"] | QuantizedPool,
    new: Float[Array, "B T K H"],
    entry: Int[Array, "B T"],
    parts: int = 1,
    kernels: Kernels | None = None,
) -> Any:
    """Writes entries to the tail at their numbers; numbers beyond its end are ignored. They are quantised as it is."""
    slots = tail.shape[2]
    slot = jnp.where(entry < slots, ops.slot_of(entry, 0, slots, parts), slots)
    slot = jnp.broadcast_to(slot[..., None], new.shape[:3])
    if not isinstance(tail, QuantizedPool):
        return _write(tail, new, slot, parts, kernels)
    stored = quantize_rotated(new.astype(tail.dtype), jnp.ones(new.shape[:3], bool), bits=tail.bits)
    return jax.tree.map(lambda x, y: _write(x, y, slot, parts, kernels), tail, stored)


def quantize_old(
    tail: tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]],
    tail_count: Int[Array, " B"],
    *,
    bits: int,
    group: int,
    window: int,
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Keys and values of a tail as attention sees them if KIVI quantises what leaves its window (its Alg. 1).

    Keys leave `window` at a time, so that their groups along the slots are complete; values leave one by one.

    Args:
        tail: keys and values in full precision.
        tail_count: entries of each row, the new one included.
        bits: see `quantize`.
        group: likewise; divides `window`.
        window: entries in full precision.
    """
    slot = jnp.arange(tail[0].shape[2])
    old = slot < (tail_count // window * window)[:, None], slot < (tail_count - window)[:, None]
    made = []
    for x, left, axis in zip(tail, old, ("slots", "channels"), strict=True):
        used = jnp.broadcast_to(left[:, None], x.shape[:3])
        stored = dequantize(quantize(x, used, bits=bits, group=group, axis=axis))  # type: ignore[arg-type]
        made.append(jnp.where(used[..., None], stored, x))
    return made[0], made[1]


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
        entry: number of the entry in its segment.
        start: first slot of the segment.
        valid: rows to write; None: all.
        parts: into which a mesh splits the slots.
        kernels: implementations; None: those of the platform.
    """
    slots = pool.shape[2]
    slot = ops.slot_of(entry, start, slots, parts)
    return _write(pool, new, slot if valid is None else jnp.where(valid[..., None], slot, slots), parts, kernels)


@partial(jax.jit, static_argnums=(3, 4))  # traced once for all layers
def _write(x: Array, new: Array, slot: Int[Array, "B T K"], parts: int, kernels: Kernels | None) -> Array:
    """Writes `new` [B, T, K, ...] to slots of x [B, #K, P, ...]; slots past the end are ignored."""

    def local(part: ops.Part, x: Array, new: Array, slot: Array) -> Array:
        slot = part.local_slot(slot, x.shape[2])
        if x.ndim == 4 and slot.shape[1] == 1:
            implementation = None if kernels is None else kernels.write_slots
            return write_slots(x, new[:, 0], slot[:, 0], implementation=implementation)
        row = jnp.arange(x.shape[0])[:, None, None]
        return x.at[row, jnp.arange(x.shape[1]), slot].set(new, mode="drop", wrap_negative_indices=False)

    pool, entries = (f"B {axes}" + " H" * (x.ndim - 3) for axes in ("K P", "T K"))
    run = ops.split(local, (pool, entries, "B T K"), pool, batch=x.shape[0], kv_heads=x.shape[1], parts=parts)
    return run(x, new, slot)
