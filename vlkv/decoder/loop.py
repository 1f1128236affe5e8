"""A loop over equal layers, which is compiled once and not once per layer.

XLA on a CPU copies a slice of stacked weights before it multiplies, so the weights stay where they are: only their
products are compiled for each layer, as the branches of a switch. Small arrays, such as those of norms, are stacked.

Axes: B batch · T tokens · D width · A position axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import target_platform
from vlkv.decoder.decoder import Decoder, DecoderLayer
from vlkv.decoder.layers import Chosen
from vlkv.decoder.memory_maps import make_room
from vlkv.sharding.ops import axis_size

C = TypeVar("C")  # the carry of `loop`
_LEAST = 3  # layers for which a loop is compiled faster than its repetitions


def can_loop(decoder: Decoder) -> bool:
    """Whether layers are compiled faster as a loop: on one CPU, and if they have the same parts of the same sizes."""
    layers = decoder.layers
    if target_platform() != "cpu" or len(layers) < _LEAST or axis_size("data") > 1 or axis_size("model") > 1:
        return False
    if layers[0].experts is not None or layers[0].mix_input is not None:
        return False
    kinds = {(jax.tree.structure(layer), *((x.shape, x.dtype) for x in jax.tree.leaves(layer))) for layer in layers}
    return len(kinds) == 1 and all(kind.is_counted for kind in decoder.kinds)


def loop(
    decoder: Decoder,
    carry: C,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    attend: Callable[[Int[Array, ""], C, Array, Array, Array], tuple[C, Array]],
    limit: Int[Array, " B"] | None = None,
) -> tuple[C, Float[Array, "B T D"]]:
    """Runs all layers like `Decoder.walk`, in one loop, if `can_loop`. `attend` gets the layer's number as an array.

    `attend` must return a carry with the structure and shapes of the one that it gets.
    """
    make_room()
    rotation, weights = decoder.rotation(positions, limit), _weights(decoder)

    def run(i: Int[Array, ""], state: tuple[C, Array]) -> tuple[C, Array]:
        carry, x = state
        layer = _layer(weights, i)
        q, k, v = layer.project(x, rotation)
        carry, attended = attend(i, carry, q, k, v)
        return carry, layer.close(layer.finish(x, attended.astype(x.dtype)), None)

    return jax.lax.fori_loop(0, len(decoder.layers), run, (carry, x))


def _weights(decoder: Decoder) -> DecoderLayer:
    """A layer with the weights of all layers: a tuple for each that `product` multiplies, and other arrays stacked."""

    def join(path: tuple[Any, ...], *arrays: Array) -> Any:
        stays = arrays[0].ndim > 1 and "weight" in jax.tree_util.keystr(path)
        return arrays if stays else jnp.stack(arrays)

    weights: DecoderLayer = jax.tree_util.tree_map_with_path(join, *decoder.layers)
    return weights


def _layer(weights: DecoderLayer, i: Int[Array, ""]) -> DecoderLayer:
    """Layer i as a module: each of its weights is chosen when the program runs, because i is an array."""

    def choose(x: Any) -> Any:
        return Chosen(x, i) if isinstance(x, tuple) else jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

    layer: DecoderLayer = jax.tree.map(choose, weights, is_leaf=lambda x: isinstance(x, tuple))
    return layer
