"""Weights on a mesh with axes `data` and `model`: which axis of which parameter is split over `model`.

Heads, MLP channels and the vocabulary are split where they divide evenly; everything else is replicated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

# The last two parts of a parameter's path -> the axis that is split.
_SPLIT_AXIS: dict[str, int] = {
    "query.weight": 0, "query.bias": 0, "key.weight": 0, "key.bias": 0, "value.weight": 0, "value.bias": 0,
    "out.weight": 1,
    "gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1,
    "embedding.weight": 0, "head.weight": 0,
}  # fmt: skip


def path_name(keypath: tuple[Any, ...]) -> str:
    """`decoder.layers.0.query.weight` from a pytree key path of a model."""
    parts = [getattr(key, "name", getattr(key, "idx", None)) for key in keypath]
    return ".".join(str(part) for part in parts[:-1])  # the last is nnx.Param's own `value`


def spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How one parameter lies on the mesh."""
    axis = _SPLIT_AXIS.get(".".join(path.split(".")[-2:]))
    if axis is None or "model" not in mesh.shape or shape[axis] % mesh.shape["model"]:
        return PartitionSpec()
    return PartitionSpec(*(None,) * axis, "model")


def where(path: str, shape: tuple[int, ...], mesh: Mesh | None) -> Sharding:
    """Where one parameter lies: split over the mesh, or on the default device."""
    return jnp.zeros(()).sharding if mesh is None else NamedSharding(mesh, spec(path, shape, mesh))


def place(path: str, array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """An array on the default device, or split over the mesh without a whole copy on any device."""
    if mesh is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, where(path, array.shape, mesh), lambda index: array[index])
