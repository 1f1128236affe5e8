"""A mixture of experts on a mesh: each device computes its rows, and its experts or some channels of all experts.

Axes: B batch · T tokens · D width · E experts · F channels of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jaxtyping import Array

from vlkv.sharding.ops import MODEL, axis_size, on_mesh


def sum_over_experts(
    f: Callable[..., Array], tokens: tuple[Array, Array], weights: tuple[Array, Array, Array, Array]
) -> Array:
    """Runs f(tokens, weights, first), which is a sum over experts and their channels, on local arrays.

    Args:
        f: function of both tuples, and of the number of the first local expert; returns [B, T, D].
        tokens: two arrays [B, T, ...], split by rows if `data` divides them.
        weights: [E, F, D], [E, F, D], [E, D, F] and [E], split by experts E, or by channels F, as in `MESH_AXIS`.
    """
    model, (experts, channels, _) = axis_size(MODEL), weights[0].shape
    axis = next((axis for axis, size in (("E", experts), ("F", channels)) if model > 1 and size % model == 0), None)

    def local(tokens: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
        first = jax.lax.axis_index(MODEL) * len(weights[0]) if axis == "E" else 0
        made = f(tokens, weights, first)
        return made if axis is None else jax.lax.psum(made, MODEL)

    axes, over = (("B T D", "B T D"), ("E F D", "E F D", "E D F", "E")), {} if axis is None else {axis: MODEL}
    return on_mesh(local, axes, "B T D", batch=tokens[0].shape[0], **over)(tokens, weights)
