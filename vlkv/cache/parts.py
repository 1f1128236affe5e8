"""How the arrays of a cache are split over the devices of a mesh, and which slot an entry has.

If `model` divides the columns of the pool, heads are split over it. If not, pool and tail consist of M parts, one per
device: each device attends with all heads to every M-th entry, and the results are combined by their log-sum-exps.

Axes: B batch · T tokens · N query heads · K key heads · P slots of a pool or a tail · M parts of the slots. A string
such as "B K P H" names the axes of an array; `split` splits B, N, K and P.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from pallas_kernels.denominator import normalized, with_constant
from vlkv.errors import InputError
from vlkv.sharding.ops import MODEL, axis_size, on_mesh


@dataclasses.dataclass(frozen=True)
class Part:
    """One device's part of a cache: entries `index`, `index` + `count`, ... of every segment and tail."""

    index: Array | int = 0
    count: int = 1

    def local_count(self, entries: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Number of local entries among the first `entries`."""
        return entries if self.count == 1 else jnp.maximum(-(-(entries - self.index) // self.count), 0)

    def local_entries(self, x: Bool[Array, "*n E"]) -> Bool[Array, "*n e"]:
        """Selects this device's entries along the last axis. Pads with False so that all devices have equally many."""
        if self.count == 1:
            return x
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % self.count)])
        x = x.reshape(*x.shape[:-1], -1, self.count)
        return jax.lax.dynamic_index_in_dim(x, self.index, axis=-1, keepdims=False)

    def gather_entries(self, x: Any, entries: int) -> Any:
        """The inverse of `local_entries`: gathers all `entries` entries on every device."""
        if self.count == 1:
            return x
        x = jax.lax.all_gather(x, MODEL, axis=x.ndim)
        return x.reshape(*x.shape[:-2], -1)[..., :entries]

    def local_slot(self, slot: Int[Array, "*n"], slots: int) -> Int[Array, "*n"]:
        """The local index of a slot; `slots`, the number of slots of each device, if another device has it."""
        slot = slot - self.index * slots
        return jnp.where((slot >= 0) & (slot < slots), slot, slots)

    def listed(self, entries: Int[Array, "B C"], count: Int[Array, " B"]) -> tuple[Int[Array, "B c"], Int[Array, " B"]]:
        """The local entries of an increasing list of distinct entries, as local numbers, and their count."""
        if self.count == 1:
            return entries, count
        here = (jnp.arange(entries.shape[1]) < count[:, None]) & (entries % self.count == self.index)
        order = jnp.argsort(~here, axis=1, stable=True)[:, : -(-entries.shape[1] // self.count)]
        return jnp.take_along_axis(entries // self.count, order, axis=1), jnp.sum(here, axis=1, dtype=count.dtype)

    def combine(
        self, first: tuple[Array, ...], second: tuple[Array, ...] | None = None, softmax_n: float = 0.0
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
        """`pallas_kernels.combine` for one or two sets of keys and the parts of all devices."""
        out, lse = first if second is None else pallas_kernels.combine(first, second)
        if self.count == 1:
            return with_constant(out, lse, softmax_n)
        peak = jax.lax.pmax(lse, MODEL)
        peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
        weight = jnp.exp(lse - peak)[..., None]
        joint = jax.lax.psum(jnp.concatenate([out * weight, weight], axis=-1), MODEL)
        out, weight = joint[..., :-1], joint[..., -1]
        return with_constant(*normalized(out, peak, weight), softmax_n)


def slot_of(entry: Any, start: Any, slots: int, parts: int) -> Any:
    """The slot of entry number `entry` of a segment, or of a tail (start 0), in a pool or tail of `slots` slots."""
    if parts == 1:
        return start + entry
    return entry % parts * (slots // parts) + start + entry // parts


def slot_parts(columns: int, model: int | None = None) -> int:
    """M: 1 if the columns of the pool can be split over `model` devices (None: of the mesh), else their number."""
    model = axis_size(MODEL) if model is None else model
    return model if columns % model else 1


def split(
    f: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any, *, batch: int, kv_heads: int, parts: int = 1
) -> Callable[..., Any]:
    """Runs f(part, *arrays) on local arrays, split by rows (B), key heads and their queries (K, N), or slots (P).

    Args:
        f: function of a `Part` and the arrays.
        inputs: the axes of each array, or of all arrays of a tree.
        outputs: the axes of the results.
        batch: number of rows, which are split if `data` divides it.
        kv_heads: number of key heads, which are split if `model` divides it and slots are not split.
        parts: M of the cache.

    Raises:
        InputError: the cache was made on another mesh.
    """
    model = axis_size(MODEL)
    if parts not in (1, model):
        where = f"the slots of the cache are in {parts} parts, but `model` of the current mesh has {model} devices"
        raise InputError(f"{where}: set a mesh with model={parts}, or make the cache again")
    heads = MODEL if parts == 1 and model > 1 and kv_heads % model == 0 else None
    slots = MODEL if parts > 1 else None

    def local(*arrays: Any) -> Any:
        return f(Part(jax.lax.axis_index(MODEL), parts) if parts > 1 else Part(), *arrays)

    return on_mesh(local, inputs, outputs, batch=batch, N=heads, K=heads, P=slots)
