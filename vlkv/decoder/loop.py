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

from pallas_kernels.cpu import restored, stored
from pallas_kernels.dispatch import target_platform
from vlkv.config import LayerKind
from vlkv.decoder.decoder import Decoder, DecoderLayer
from vlkv.decoder.layers import Chosen
from vlkv.decoder.memory_maps import make_room
from vlkv.sharding.ops import axis_size

C = TypeVar("C")  # the carry of `loop`
# number of a layer, carry, q, k, v -> carry, [B,T,N,H], result
LoopAttend = Callable[[Int[Array, ""], C, Array, Array, Array], tuple[C, Array, Any]]
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


def kind_of(decoder: Decoder, i: Any) -> LayerKind:
    """The kind of layer i, which is an array in a loop over equal layers; then `number` is this array."""
    return decoder.kinds[i] if isinstance(i, int) else decoder.kinds[0]._replace(number=i)


def loop(
    decoder: Decoder,
    carry: C,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    attend: LoopAttend[C],
    limit: Int[Array, " B"] | None = None,
    *,
    added: Float[Array, "B S T D"] | None = None,
    only: Int[Array, " B"] | None = None,
) -> tuple[C, Float[Array, "B _T D"], Any]:
    """Runs all layers like `Decoder.walk`, in one loop, if `can_loop`.

    Args:
        decoder: with equal layers.
        carry: what a layer hands to the next one besides `x`.
        x: input of the first layer.
        positions: of the tokens.
        attend: gets the layer's number as an array. It must return a carry with the structure and shapes of the one
            that it gets, and may return a result.
        limit: as in `rope_table`.
        added: as in `Decoder.add_features`.
        only: index of the one token of each row whose output is needed; None: all.

    Returns:
        The last carry, the output of the last layer, and the results of `attend`, stacked along a first axis L.
    """
    make_room()
    rotation, weights, count = decoder.rotation(positions, limit), _weights(decoder), len(decoder.layers)
    row = jnp.arange(len(x))

    def finish(layer: DecoderLayer, x: Array, attended: Array, given: Array | None) -> Array:
        return layer.close(layer.finish(x, attended.astype(x.dtype)), given)

    def run(state: tuple[C, Array], i: Int[Array, ""]) -> tuple[tuple[C, Array], Any]:
        carry, x = state
        layer = _layer(weights, i)
        q, k, v = layer.project(x, rotation)
        carry, attended, result = attend(i, carry, q, k, v)
        given = None if added is None else _added_by(added, i)
        if only is None:
            x, needed = finish(layer, x, attended, given), None
        else:  # a loop of one iteration, or none in the last layer: a condition would copy its operands
            needed = attended[row, only][:, None]
            x = jax.lax.fori_loop(
                0, (i < count - 1).astype(jnp.int32), lambda _, x: finish(layer, x, attended, given), x
            )
        shapes.append(result)
        return (carry, x), (jax.tree.map(stored, result), needed)

    shapes: list[Any] = []  # of the results
    (carry, x), (results, needed) = jax.lax.scan(run, (carry, x), jnp.arange(count))
    results = jax.tree.map(lambda of_layer, stacked: restored(stacked, of_layer.dtype), shapes[0], results)
    if only is not None:
        given = None if added is None else _added_by(added, jnp.asarray(count - 1))[row, only][:, None]
        x = finish(decoder.layers[-1], x[row, only][:, None], needed[-1], given)
    return carry, x, results


def _added_by(added: Float[Array, "B S T D"], i: Int[Array, ""]) -> Float[Array, "B T D"]:
    """What layer i adds to its output; zeros from layer S on."""
    of_layer = jax.lax.dynamic_index_in_dim(added, jnp.minimum(i, added.shape[1] - 1), axis=1, keepdims=False)
    return jnp.where(i < added.shape[1], of_layer, 0)


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
