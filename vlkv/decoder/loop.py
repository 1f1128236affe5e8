"""A loop over layers, in which attention and what a method observes are compiled once and not once per layer.

What a layer does before and after its attention is compiled for each layer, as the branches of three switches. XLA on
a CPU would copy a slice of stacked weights before it multiplies; in a branch it reads them where they are.

Axes: B batch · T tokens · D width · A position axes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import restored, stored
from pallas_kernels.dispatch import target_platform
from vlkv.config import LayerKind
from vlkv.decoder.decoder import Decoder, DecoderLayer
from vlkv.decoder.memory_maps import make_room
from vlkv.sharding.ops import axis_size

C = TypeVar("C")  # the carry of `loop`
# number of a layer, carry, q, k, v -> carry, [B,T,N,H], result
LoopAttend = Callable[[Int[Array, ""], C, Array, Array, Array], tuple[C, Array, Any]]
_LEAST = 3  # layers for which a loop is compiled faster than its repetitions


def can_loop(decoder: Decoder) -> bool:
    """Whether layers are compiled faster as a loop: on one CPU, and if all have full attention and their own keys."""
    if target_platform() != "cpu" or axis_size("data") > 1 or axis_size("model") > 1:
        return False
    return len(decoder.layers) >= _LEAST and all(kind.is_counted for kind in decoder.kinds)


def kind_of(decoder: Decoder, i: Any) -> LayerKind:
    """The kind of layer i, which is an array in a loop; then `number` is this array."""
    return decoder.kinds[i] if isinstance(i, int) else decoder.kinds[0]._replace(number=i)


def loop(
    decoder: Decoder,
    carry: C,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    attend: LoopAttend[C],
    limit: Int[Array, " B"] | None = None,
    *,
    added: Float[Array, "B S T _D"] | None = None,
    only: Int[Array, " B"] | None = None,
) -> tuple[C, Float[Array, "B _T D"], Any]:
    """Runs all layers like `Decoder.walk`, in one loop, if `can_loop`.

    Args:
        decoder: of the model.
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
    rotation, layers, row = decoder.rotation(positions, limit), decoder.layers, jnp.arange(len(x))
    project = [layer.project for layer in layers]
    join: list[Callable[..., Array]] = [layer.join for layer in layers]
    finish: list[Callable[..., Array]] = [partial(_finish, layer) for layer in layers]
    if only is not None:  # only one token of each row passes the end of the last layer
        join[-1] = finish[-1] = lambda x, *_: x

    def run(state: tuple[C, Array], i: Int[Array, ""]) -> tuple[tuple[C, Array], Any]:
        carry, x = state
        carry, attended, result = attend(i, carry, *jax.lax.switch(i, project, x, rotation))
        shapes.append(result)
        x = jax.lax.switch(i, join, x, attended.astype(x.dtype))
        x = jax.lax.switch(i, finish, x, _added_by(added, i))
        return (carry, x), (jax.tree.map(stored, result), None if only is None else attended[row, only][:, None])

    shapes: list[Any] = []  # of the results
    (carry, x), (results, needed) = jax.lax.scan(run, (carry, x), jnp.arange(len(layers)))
    results = jax.tree.map(lambda of_layer, stacked: restored(stacked, of_layer.dtype), shapes[0], results)
    if only is not None:
        given = _added_by(added, len(layers) - 1)
        given = None if given is None else given[row, only][:, None]
        x = _finish(layers[-1], layers[-1].join(x[row, only][:, None], needed[-1].astype(x.dtype)), given)
    return carry, x, results


def _finish(layer: DecoderLayer, x: Array, given: Array | None) -> Float[Array, "B T D"]:
    return layer.close(layer.finish(x), given)


def _added_by(added: Float[Array, "B S T _D"] | None, i: int | Int[Array, ""]) -> Float[Array, "B T _D"] | None:
    """What is added to the output of layer i, or mixed in; zeros from layer S on."""
    if added is None:
        return None
    of_layer = jax.lax.dynamic_index_in_dim(added, jnp.minimum(i, added.shape[1] - 1), axis=1, keepdims=False)
    return jnp.where(i < added.shape[1], of_layer, 0)
