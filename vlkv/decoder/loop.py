"""A loop over equal layers, which is compiled once and not once per layer.

XLA on a CPU copies a slice of stacked weights before it multiplies, so the weights stay where they are: only their
products are compiled for each layer, as the branches of a switch. Small arrays, such as those of norms, are stacked.

Axes: L layers · D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import target_platform

T = TypeVar("T")
_LEAST = 3  # layers for which a loop is compiled faster than its repetitions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """The weight of one layer: entry `layer` of those of all layers, for `layers.product`."""

    weights: tuple[Float[Array, "..."], ...]
    layer: Int[Array, ""]

    def __getitem__(self, everything: Any) -> Chosen:
        """Itself: modules read a weight as `weight[...]`."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one weight."""
        return self.weights[0].shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of all weights."""
        return self.weights[0].dtype


def can_loop(layers: Sequence[Any]) -> bool:
    """Whether layers are compiled faster as a loop: on a CPU, and if they have the same parts of the same sizes."""
    if target_platform() != "cpu" or len(layers) < _LEAST:
        return False
    kinds = {(jax.tree.structure(layer), *((x.shape, x.dtype) for x in jax.tree.leaves(layer))) for layer in layers}
    return len(kinds) == 1


def chosen(layers: Sequence[T], i: Int[Array, ""]) -> T:
    """Layer i of equal layers, whose number is not known when the program is compiled."""

    def choose(path: tuple[Any, ...], *arrays: Array) -> Any:
        if arrays[0].ndim > 1 and "weight" in jax.tree_util.keystr(path):
            return Chosen(arrays, i)
        return jax.lax.dynamic_index_in_dim(jnp.stack(arrays), i, keepdims=False)

    return jax.tree_util.tree_map_with_path(choose, *layers)
