"""Attention ops on a mesh, where each device computes a part.

XLA can split neither Pallas kernels nor the queue of blocks used for decoding on a CPU. So every op runs in `shard_map`
on local arrays, and `pallas_kernels` chooses an implementation as on one device. Without a mesh (`jax.set_mesh`), on a
mesh of one device, and within another `shard_map`, ops are called directly.

Rows are split over `data` and heads over `model`; query heads are on the device of their key head, so no communication
is needed. If `model` has more devices than there are key heads, several devices share a key head in prefill, each with
a part of its queries, and the cache is split over slots: each device attends with all heads to every M-th entry.

The ops are jitted, so that jax traces and lowers each once for all layers of a model, not once per layer.

Axes: B batch · T tokens · N query heads · K key heads · G = N/K · P slots of a pool or a tail · M parts of a cache's
slots · R weightings. A string such as "B K P H" names the axes of an array; `split` splits B, N, K and P.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from pallas_kernels.denominator import normalized, with_constant
from pallas_kernels.prefill_attention import Attended
from vlkv.errors import InputError

_DATA, _MODEL = "data", "model"
_OPTIONS = ("causal", "softmax_n", "statistic", "threshold", "implementation")  # of `attention_mass` and `_rows`


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
        x = jax.lax.all_gather(x, _MODEL, axis=x.ndim)
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
        peak = jax.lax.pmax(lse, _MODEL)
        peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
        weight = jnp.exp(lse - peak)[..., None]
        joint = jax.lax.psum(jnp.concatenate([out * weight, weight], axis=-1), _MODEL)
        out, weight = joint[..., :-1], joint[..., -1]
        return with_constant(*normalized(out, peak, weight), softmax_n)


# --- the mesh -------------------------------------------------------------------------------------------------------


def _mesh() -> AbstractMesh | None:
    """The mesh over which XLA splits arrays; None on one device or within `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = {kind for _, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True) if size > 1}
    if AxisType.Explicit in kinds:
        raise InputError("the mesh has explicit axes, which vlkv does not support: use vlkv.sharding.make_mesh")
    return mesh if kinds == {AxisType.Auto} else None


def axis_size(axis: str) -> int:
    """Number of devices along an axis of the current mesh; 1 without a mesh."""
    mesh = _mesh()
    return 1 if mesh is None else mesh.shape.get(axis, 1)


def slot_parts(columns: int, model: int | None = None) -> int:
    """M: 1 if the columns of the pool can be split over `model` devices (None: of the mesh), else their number."""
    model = axis_size(_MODEL) if model is None else model
    return model if columns % model else 1


def by_row(f: Callable[..., Any], batch: int) -> Callable[..., Any]:
    """`jax.vmap(f)` over the rows of a batch, which are split over `data` in the ops that f calls."""
    divides = axis_size(_DATA) > 1 and batch % axis_size(_DATA) == 0
    return jax.vmap(f, spmd_axis_name=_DATA if divides else None)


def split(
    f: Callable[..., Any],
    inputs: tuple[Any, ...],
    outputs: Any,
    *,
    batch: int,
    kv_heads: int,
    parts: int = 1,
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
    mesh = _mesh()
    model = axis_size(_MODEL)
    if parts not in (1, model):
        where = f"the slots of the cache are in {parts} parts, but `model` of the current mesh has {model} devices"
        raise InputError(f"{where}: set a mesh with model={parts}, or make the cache again")
    if mesh is None:
        return lambda *arrays: f(Part(), *arrays)
    heads = _MODEL if parts == 1 and model > 1 and kv_heads % model == 0 else None
    mesh_axes = {
        "B": _DATA if _DATA in mesh.shape and batch % mesh.shape[_DATA] == 0 else None,
        "N": heads,
        "K": heads,
        "P": _MODEL if parts > 1 else None,
    }

    def local(*arrays: Any) -> Any:
        return f(Part(jax.lax.axis_index(_MODEL), parts) if parts > 1 else Part(), *arrays)

    return _shard_map(local, inputs, outputs, mesh_axes)


def _shard_map(f: Callable[..., Any], inputs: Any, outputs: Any, mesh_axes: dict[str, Any]) -> Callable[..., Any]:
    def spec(axes: str) -> PartitionSpec:
        return PartitionSpec(*(mesh_axes.get(axis) for axis in axes.split()))

    return jax.shard_map(f, in_specs=jax.tree.map(spec, inputs), out_specs=jax.tree.map(spec, outputs), check_vma=False)


# --- ops of prefill and of scores -----------------------------------------------------------------------------------


_Arrays = dict[str, tuple[Any, str]]


def _over_heads(op: Callable[..., Any], arrays: _Arrays, output: Any) -> Any:
    """Runs op(**arrays) split by heads, if `model` divides the key heads or is a multiple of them.

    If it is a multiple, the queries of a key head are divided among several devices, padded to equal numbers. Each
    device gets all keys and uses one head of them.

    Args:
        op: the op.
        arrays: its arguments "q", "k" and others, with the names of their axes.
        output: the axes of its results.
    """
    values, axes = zip(*arrays.values(), strict=True)
    heads, kv_heads = (arrays[name][0].shape[arrays[name][1].split().index(axis)] for name, axis in ("qN", "kK"))

    def run(*values: Any) -> Any:
        return op(**dict(zip(arrays, values, strict=True)))

    mesh, model = _mesh(), axis_size(_MODEL)
    if mesh is None:
        return run(*values)
    batch = next((x.shape[0] for x, names in arrays.values() if names.startswith("B")), 0)
    mesh_axes = {"B": _DATA if _DATA in mesh.shape and batch % mesh.shape[_DATA] == 0 else None}
    if model == 1 or (kv_heads % model and model % kv_heads):
        return _shard_map(run, axes, output, mesh_axes)(*values)
    mesh_axes["N"] = _MODEL
    if kv_heads % model == 0:
        return _shard_map(run, axes, output, {**mesh_axes, "K": _MODEL})(*values)
    sharing, group = model // kv_heads, heads // kv_heads
    spare = -group % sharing

    def local(*values: Any) -> Any:
        head = jax.lax.axis_index(_MODEL) // sharing

        def of_head(x: Any, names: str) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, head, 1, names.split().index("K")) if "K" in names else x

        return run(*map(of_head, values, axes))

    def regroup(x: Array, at: int, change: Callable[[Array], Array]) -> Array:
        grouped = change(x.reshape(*x.shape[:at], kv_heads, -1, *x.shape[at + 1 :]))
        return grouped.reshape(*x.shape[:at], -1, *x.shape[at + 1 :])

    def pad(x: Any, names: str) -> Any:
        if x is None or spare == 0 or "N" not in names:
            return x
        unsplit = PartitionSpec(*(mesh_axes.get(axis) if axis == "B" else None for axis in names.split()))
        x, at = jax.lax.with_sharding_constraint(x, unsplit), names.split().index("N")
        return regroup(x, at, lambda y: jnp.pad(y, [(0, spare * (i == at + 1)) for i in range(y.ndim)]))

    def unpad(axes: str, x: Array) -> Array:
        at = axes.split().index("N")
        return regroup(x, at, lambda y: jax.lax.slice_in_dim(y, 0, group, axis=at + 1))

    result = _shard_map(local, axes, output, mesh_axes)(*map(pad, values, axes))
    return jax.tree.map(unpad, output, result) if spare else result


@partial(jax.jit, static_argnames=(*_OPTIONS, "ahead", "window", "return_lse", "statistics"))
def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    valid: Bool[Array, "B T"] | None = None,
    place: Int[Array, "B T"] | None = None,
    until: Int[Array, "B T"] | None = None,
    row_weight: Float[Array, "B R T"] | None = None,
    **options: Any,
) -> Any:
    """`pallas_kernels.prefill_attention`."""
    axes: Any = ("B T N H", "B N T" if options.get("return_lse") else None, None if row_weight is None else "B R N T")
    arrays = {
        "q": (q, "B T N H"),
        "k": (k, "B T K H"),
        "v": (v, "B T K H"),
        "valid": (valid, "B T"),
        "place": (place, "B T"),
        "until": (until, "B T"),
        "row_weight": (row_weight, "B R T"),
    }
    op = partial(pallas_kernels.prefill_attention, **options)
    return _over_heads(op, arrays, Attended(*axes) if any(axes[1:]) else axes[0])


@partial(jax.jit, static_argnames=_OPTIONS)
def attention_mass(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    *,
    row_weight: Float[Array, "R T"],
    key_mask: Bool[Array, " S"],
    row_place: Int[Array, " T"] | None = None,
    lse: Float[Array, "N T"] | None = None,
    **options: Any,
) -> Float[Array, "R N S"]:
    """`pallas_kernels.attention_mass`."""
    arrays: _Arrays = {"q": (q, "N T H"), "k": (k, "K S H")}
    arrays |= {"row_weight": (row_weight, "R T"), "key_mask": (key_mask, "S")}
    arrays |= {"row_place": (row_place, "T"), "lse": (lse, "N T")}
    return _over_heads(partial(pallas_kernels.attention_mass, **options), arrays, "R N S")


@partial(jax.jit, static_argnames=_OPTIONS)
def attention_mass_rows(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    *,
    key_weight: Float[Array, "R S"],
    key_mask: Bool[Array, " S"],
    row_place: Int[Array, " T"] | None = None,
    **options: Any,
) -> Float[Array, "R N T"]:
    """`pallas_kernels.attention_mass_rows`."""
    arrays: _Arrays = {"q": (q, "N T H"), "k": (k, "K S H"), "key_weight": (key_weight, "R S")}
    arrays |= {"key_mask": (key_mask, "S"), "row_place": (row_place, "T")}
    return _over_heads(partial(pallas_kernels.attention_mass_rows, **options), arrays, "R N T")
