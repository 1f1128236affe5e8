"""Attention ops on a mesh, where each device computes a part.

XLA can split neither Pallas kernels nor the queue of blocks used for decoding on a CPU. So every op runs in `shard_map`
on local arrays, and `pallas_kernels` chooses an implementation as on one device. Without a mesh (`jax.set_mesh`), on a
mesh of one device, and within another `shard_map`, ops are called directly.

Rows are split over `data` and heads over `model`; query heads are on the device of their key head, so no communication
is needed. If `model` has more devices than there are key heads, several devices share a key head in prefill, each with
a part of its queries. The cache is then split over slots; see `vlkv/cache/parts.py`.

The ops are jitted, so that jax traces and lowers each once for all layers of a model, not once per layer.

Axes: B batch · T tokens · N query heads · K key heads · G = N/K · R weightings. A string such as "B T K H" names
the axes of an array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from pallas_kernels.prefill_attention import Attended
from vlkv.errors import InputError

DATA, MODEL = "data", "model"
_OPTIONS = ("causal", "softmax_n", "statistic", "threshold", "implementation")  # of `attention_mass` and `_rows`


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


def by_row(f: Callable[..., Any], batch: int) -> Callable[..., Any]:
    """`jax.vmap(f)` over the rows of a batch, which are split over `data` in the ops that f calls."""
    return jax.vmap(f, spmd_axis_name=_rows_axis(batch))


def on_mesh(
    f: Callable[..., Any], inputs: Any, outputs: Any, *, batch: int, **mesh_axes: str | None
) -> Callable[..., Any]:
    """Runs f on local arrays; without a mesh, on all of them.

    Args:
        f: the function.
        inputs: the axes of each array, or of all arrays of a tree.
        outputs: the axes of the results.
        batch: number of rows (B), which are split over `data` if it divides them.
        mesh_axes: over which mesh axis another axis is split.
    """
    if _mesh() is None:
        return f
    mesh_axes["B"] = _rows_axis(batch)

    def spec(axes: str) -> PartitionSpec:
        return PartitionSpec(*(mesh_axes.get(axis) for axis in axes.split()))

    return jax.shard_map(f, in_specs=jax.tree.map(spec, inputs), out_specs=jax.tree.map(spec, outputs), check_vma=False)


def _rows_axis(batch: int) -> str | None:
    return DATA if axis_size(DATA) > 1 and batch % axis_size(DATA) == 0 else None


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

    model, batch = axis_size(MODEL), next((x.shape[0] for x, names in arrays.values() if names.startswith("B")), 0)
    if model == 1 or (kv_heads % model and model % kv_heads):
        return on_mesh(run, axes, output, batch=batch)(*values)
    if kv_heads % model == 0:
        return on_mesh(run, axes, output, batch=batch, N=MODEL, K=MODEL)(*values)
    sharing, group = model // kv_heads, heads // kv_heads
    spare = -group % sharing

    def local(*values: Any) -> Any:
        head = jax.lax.axis_index(MODEL) // sharing

        def of_head(x: Any, names: str) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, head, 1, names.split().index("K")) if "K" in names else x

        return run(*map(of_head, values, axes))

    def regroup(x: Array, at: int, change: Callable[[Array], Array]) -> Array:
        grouped = change(x.reshape(*x.shape[:at], kv_heads, -1, *x.shape[at + 1 :]))
        return grouped.reshape(*x.shape[:at], -1, *x.shape[at + 1 :])

    def pad(x: Any, names: str) -> Any:
        if x is None or spare == 0 or "N" not in names:
            return x
        unsplit = PartitionSpec(*(_rows_axis(batch) if axis == "B" else None for axis in names.split()))
        x, at = jax.lax.with_sharding_constraint(x, unsplit), names.split().index("N")
        return regroup(x, at, lambda y: jnp.pad(y, [(0, spare * (i == at + 1)) for i in range(y.ndim)]))

    def unpad(axes: str, x: Array) -> Array:
        at = axes.split().index("N")
        return regroup(x, at, lambda y: jax.lax.slice_in_dim(y, 0, group, axis=at + 1))

    result = on_mesh(local, axes, output, batch=batch, N=MODEL)(*map(pad, values, axes))
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
