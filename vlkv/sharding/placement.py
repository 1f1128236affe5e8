"""Shardings of weights, inputs and caches on a mesh with the axes `data` and `model`.

    mesh = make_mesh(data=2, model=4)
    params, processor = vlkv.load(folder, mesh=mesh)
    with jax.set_mesh(mesh):
        output = jax.jit(vlkv.generate)(params, place_inputs(inputs, mesh), policy=policy)
    tokens = gather(output.tokens)

The axes of an array have logical names; MESH_AXIS maps these names to axes of the mesh. An axis is split if the mesh
axis divides it; if several axes map to the same mesh axis, the first that can be split is. `vlkv.families.abstract(
config, dtype, mesh)` returns the shapes of a model with their shardings. vlkv/sharding/ops.py runs ops on shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from vlkv.errors import InputError

Axes = tuple[str | None, ...]
T = TypeVar("T")

MESH_AXIS = {
    "batch": "data",
    "heads": "model",
    "kv_heads": "model",
    "ring_heads": "model",  # split also if the pool is split by slots, because its layers may have fewer key heads
    "slots": "model",
    "head_dim": "model",  # if heads cannot be split, so that every weight is still read by only one chip
    "experts": "model",
    "channels": "model",
    "vocab": "model",
}

# The last two parts of a parameter's path -> its axes; other parameters are replicated.
_HEADS: Axes = ("heads", "head_dim", None)
_WEIGHTS: dict[str, Axes] = {
    "query.weight": _HEADS, "query.bias": _HEADS[:2],
    "key.weight": _HEADS, "key.bias": _HEADS[:2],
    "value.weight": _HEADS, "value.bias": _HEADS[:2],
    "out.weight": (None, "heads", "head_dim"),
    "out_gate.weight": _HEADS, "out_gate.bias": _HEADS[:2],
    "query.conv": _HEADS, "key.conv": _HEADS, "value.conv": _HEADS,
    "decay.weight": ("heads", None), "decay.bias": ("heads",), "decay.log_rate": ("heads",),
    "rate.weight": ("heads", None),
    "gate.weight": ("channels", None), "gate.bias": ("channels",),
    "up.weight": ("channels", None), "up.bias": ("channels",),
    "down.weight": (None, "channels"),
    "experts.gate": ("experts", "channels", None), "experts.up": ("experts", "channels", None),
    "experts.down": ("experts", None, "channels"),
    "embedding.weight": ("vocab", None), "head.weight": ("vocab", None), "table.weight": ("vocab", None),
}  # fmt: skip


def axes(*names: str | None) -> dict[str, Any]:
    """Metadata for a dataclass field with arrays, or a tree of arrays: the names of their first axes."""
    return {"axes": names}


def leaves_with_axes(tree: Any) -> list[tuple[Any, Axes]]:
    """Every array of a tree of dataclasses, and the names of its axes, which are those of the innermost field."""
    return [(x, _axes(tree, keypath, x)) for keypath, x in jax.tree_util.tree_leaves_with_path(tree)]


def map_with_axes(f: Callable[[Any, Axes], Any], tree: T) -> T:
    """Maps f(array, names of its axes) over a tree of dataclasses."""
    return jax.tree_util.tree_map_with_path(lambda keypath, x: f(x, _axes(tree, keypath, x)), tree)


def _axes(tree: Any, keypath: tuple[Any, ...], x: Any) -> Axes:
    names: Axes = ()
    for key in keypath:
        if isinstance(key, jax.tree_util.GetAttrKey):
            names = type(tree).__dataclass_fields__[key.name].metadata.get("axes", names)
            tree = getattr(tree, key.name)
        else:
            tree = tree[getattr(key, "idx", getattr(key, "key", None))]
    return (*names, *(None,) * len(x.shape))[: len(x.shape)]


def make_mesh(*, data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh for `load`, `jax.set_mesh` and `place_inputs`. Its axes are Auto: XLA chooses shardings of intermediates.

    Args:
        data: number of devices over which rows of a batch are split.
        model: number of devices over which heads, MLP channels, experts and the vocabulary are split; on one host if
            possible.
        devices: None: all devices of all processes.

    Raises:
        InputError: data x model is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if data < 1 or model < 1 or data * model != len(devices):
        raise InputError(
            f"a mesh of data={data} x model={model} needs {data * model} devices, but there are {len(devices)}: "
            "give two numbers with this product, or devices="
        )
    grid = mesh_utils.create_device_mesh((data, model), devices, allow_split_physical_axes=True)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def resolve(axes: Axes, shape: tuple[int, ...], mesh: Mesh | jax.sharding.AbstractMesh) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes and this shape."""
    mesh_axes: list[str | None] = []
    for name, size in zip(axes, shape, strict=True):
        target = None if name is None else MESH_AXIS.get(name)
        free = target in mesh.shape and target not in mesh_axes
        mesh_axes.append(target if free and size % mesh.shape[target] == 0 else None)
    while mesh_axes and mesh_axes[-1] is None:
        mesh_axes.pop()
    return PartitionSpec(*mesh_axes)


# --- weights --------------------------------------------------------------------------------------------------------


def path_name(keypath: tuple[Any, ...]) -> str:
    """`decoder.layers.0.query.weight` from a pytree key path of a model."""
    parts = [getattr(key, "name", getattr(key, "idx", None)) for key in keypath]
    return ".".join(str(part) for part in parts[:-1])  # the last is nnx.Param's own `value`


def spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of one parameter."""
    return resolve(_WEIGHTS.get(".".join(path.split(".")[-2:]), (None,) * len(shape)), shape, mesh)


def where(path: str, shape: tuple[int, ...], mesh: Mesh | None) -> Sharding:
    """The sharding of one parameter on the mesh, or on the default device without a mesh."""
    return jnp.zeros(()).sharding if mesh is None else NamedSharding(mesh, spec(path, shape, mesh))


def place(path: str, array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """Puts a parameter on the default device, or shards it over the mesh, without a whole copy on any device."""
    if mesh is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, where(path, array.shape, mesh), lambda index: array[index])


# --- inputs and outputs ---------------------------------------------------------------------------------------------


def place_inputs(inputs: T, mesh: Mesh) -> T:
    """Shards the rows of inputs over `data`, and the images too if their number can be split.

    Every process must pass the same inputs, with all rows of the batch; its devices get their own rows. So the
    processor runs on every host, which needs no communication.

    Args:
        inputs: from the processor, or any tree of arrays whose first axis is the batch. ShapeDtypeStructs get a
            sharding and stay shapes.
        mesh: from `make_mesh`.
    """

    def one(x: Any) -> Any:
        return _placed(x, NamedSharding(mesh, resolve(("batch", *(None,) * (len(x.shape) - 1)), x.shape, mesh)))

    return jax.tree.map(one, inputs)


def place_cache(cache: T, mesh: Mesh) -> T:
    """Shards a `PackedCache` as `prefill` does. ShapeDtypeStructs get a sharding and stay shapes.

    Pool and tail are split over slots if the cache has several parts, else over key heads.
    """

    def one(x: Any, names: Axes) -> Any:
        split = tuple(None if name in cache.whole_axes else name for name in names)  # type: ignore[attr-defined]
        return _placed(x, NamedSharding(mesh, resolve(split, x.shape, mesh)))

    return map_with_axes(one, cache)


def _placed(x: Any, sharding: Sharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def gather(tree: T) -> T:
    """Every array of a tree as a whole numpy array in every process. All processes must call it."""
    from jax.experimental import multihost_utils  # noqa: PLC0415 (not needed on one host)

    def one(x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(one, tree)
