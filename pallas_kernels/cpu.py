"""What XLA on a CPU needs to be told: about bfloat16, slices, and `argmax`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.dispatch import target_platform


def beside(arrays: Any, index: Int[Array, "*i"]) -> tuple[Any, Int[Array, "*i"]]:
    """The arguments unchanged. Use it to read a part of large arrays in a loop, at places that depend on `index`.

    XLA on a CPU reads bfloat16 by converting it to float32. If the arrays are the same in every iteration, it
    converts them before the loop, as a whole, although the loop may read only a few rows. After this function it
    cannot know that they are the same.
    """
    if target_platform() != "cpu" or all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(arrays)):
        return arrays, index
    return jax.lax.optimization_barrier((arrays, index))


def stored(x: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
    """The same bits in a dtype whose arrays can be updated in place.

    XLA on a CPU updates a bfloat16 array by converting all of it to float32 and back.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 and target_platform() == "cpu" else x


def restored(x: Shaped[Array, "*n"], dtype: DTypeLike) -> Shaped[Array, "*n"]:
    """The numbers of which `stored` has made x."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def argmax(x: Float[Array, "*batch n"]) -> Int[Array, "*batch"]:
    """The index of the first largest number along the last axis; any index if there is a NaN.

    XLA on a CPU computes `jnp.argmax` one number after another. Two passes with vector instructions take a quarter of
    the time.
    """
    if target_platform() != "cpu":
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    x = jax.lax.optimization_barrier(x)  # otherwise XLA could compute x twice and round it differently
    best, places = jnp.max(x, axis=-1, keepdims=True), jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == best, places, x.shape[-1] - 1), axis=-1)
