"""Small modules of towers and decoders. Weights have the checkpoint's [out, in] order.

This order needs no transpose when a checkpoint is loaded and, at batch 1 on a CPU, is read a quarter faster than
[in, out].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels.cpu import beside
from pallas_kernels.dispatch import target_platform
from vlkv.config import DecoderConfig

_MANY = 64  # rows: with fewer, a product on a CPU is faster if the weight is the first operand
_FEW = 16  # rows: with 2 to 16, XLA must not exchange the operands


class Initializer:
    """Makes random parameters of one dtype, each with a new key, with the shardings of `placed` if it is given."""

    def __init__(
        self, key: Key[Array, ""], dtype: DTypeLike = jnp.float32, placed: Iterable[Sharding] | None = None
    ) -> None:
        self.key, self.dtype, self.count = key, dtype, 0
        self.placed = None if placed is None else iter(placed)  # in the order in which parameters are made

    def normal(self, *shape: int, scale: float) -> nnx.Param:
        """A normal sample times `scale`."""
        self.count += 1
        key = jax.random.fold_in(self.key, self.count)
        if self.placed is None:
            return nnx.Param(_normal(key, shape, scale, self.dtype))
        return nnx.Param(_normal_on(key, shape, scale, self.dtype, next(self.placed)))

    def constant(self, value: float, *shape: int) -> nnx.Param:
        """All entries equal."""
        array = jnp.full(shape, value, self.dtype)
        return nnx.Param(array if self.placed is None else jax.device_put(array, next(self.placed)))


class Shapes(Initializer):
    """Makes ShapeDtypeStructs instead of arrays, and lists them in the order in which a model makes its parameters."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = dtype
        self.parameters: list[jax.ShapeDtypeStruct] = []

    def normal(self, *shape: int, scale: float) -> nnx.Param:
        """The shape of one parameter."""
        self.parameters.append(jax.ShapeDtypeStruct(shape, self.dtype))
        return nnx.Param(self.parameters[-1])

    def constant(self, value: float, *shape: int) -> nnx.Param:
        """The shape of one parameter, whose value does not matter."""
        return self.normal(*shape, scale=value)


def _normal(key: Key[Array, ""], shape: tuple[int, ...], scale: float, dtype: DTypeLike) -> Array:
    return scale * jax.random.normal(key, shape, dtype)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _normal_on(key: Array, shape: tuple[int, ...], scale: float, dtype: DTypeLike, placed: Sharding) -> Array:
    """`_normal` for one weight; each device makes only its part. One jit for all weights would compile for minutes."""
    return jax.lax.with_sharding_constraint(_normal(key, shape, scale, dtype), placed)


class Linear(nnx.Module):
    """y = x W^T + b with W [*out, in]."""

    def __init__(self, width_in: int, *out: int, bias: bool, init: Initializer) -> None:
        self.weight = init.normal(*out, width_in, scale=width_in**-0.5)
        self.bias = init.constant(0.0, *out) if bias else None

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "..."]:
        """Applies the map to the last axis."""
        y = product(self.weight[...], x)
        return y if self.bias is None else y + self.bias[...]


class SplitHeads(Linear):
    """A projection into heads: x [..., D] -> [..., N, H], weight [N, H, D]."""


class JoinHeads(nnx.Module):
    """The projection back: x [..., N, H] -> [..., D], weight [D, N, H]."""

    def __init__(self, width: int, heads: int, head_dim: int, *, bias: bool, init: Initializer) -> None:
        self.weight = init.normal(width, heads, head_dim, scale=(heads * head_dim) ** -0.5)
        self.bias = init.constant(0.0, width) if bias else None

    def __call__(self, x: Float[Array, "*batch N H"]) -> Float[Array, "*batch D"]:
        """Sums the heads back into the model width."""
        y = product(self.weight[...], x, axes=2)
        return y if self.bias is None else y + self.bias[...]

    def norms(self, v: Float[Array, "B T K H"]) -> Float[Array, "B K T"]:
        """L1 norm of each value after the projection of one query head, mean over the query heads that share it."""
        heads, kv_heads = self.weight.shape[1], v.shape[2]

        def norm(weight: Float[Array, "D H"], v: Float[Array, "B T H"]) -> Float[Array, "B T"]:
            return jnp.sum(jnp.abs(jnp.einsum("bth,dh->btd", v, weight)), axis=-1, dtype=jnp.float32)

        def shared(group: tuple[Array, Array]) -> Float[Array, "B T"]:
            weights, v = group
            return jnp.mean(jnp.stack([norm(weight, v) for weight in weights]), axis=0)

        weights = jnp.moveaxis(self.weight[...], 1, 0).reshape(kv_heads, heads // kv_heads, -1, v.shape[-1])
        return jnp.moveaxis(jax.lax.map(shared, (weights, jnp.moveaxis(v, 2, 0))), 0, 1)


def product(
    weight: Float[Array, "..."], x: Float[Array, "..."], *, axes: int = 1, dtype: DTypeLike | None = None
) -> Float[Array, "..."]:
    """Product over the last `axes` axes of both: [*out, *i] and [*batch, *i] give [*batch, *out].

    The sum is accumulated in float32; `dtype` is that of the result, None that of the arguments.

    The order of the operands changes the time, not the result. A weight of three axes comes first: if it came second,
    XLA would transpose it in every product, which on a CPU at batch 1 takes seven times as long as the product. For 2
    to 16 rows on a CPU, a matrix comes first too, because XLA would copy it in every product; this saves a tenth to six
    tenths of the time. With many rows on a CPU, x comes first, so that the result has its axes in the order in which it
    is read next: to reorder it would take more time than the product.
    """
    operands = jnp.result_type(weight, x)
    weight, x, dtype = weight.astype(operands), x.astype(operands), operands if dtype is None else dtype
    out, batch = weight.shape[: weight.ndim - axes], x.shape[: x.ndim - axes]
    if target_platform() == "cpu" and (operands == jnp.bfloat16 or math.prod(batch) >= _MANY):
        y = _product_on_cpu(weight.reshape(math.prod(out), -1), x.reshape(*batch, -1))
        return y.reshape(*batch, *out).astype(dtype)
    few = target_platform() == "cpu" and 1 < math.prod(batch) <= _FEW
    if axes == len(out) == 1 and not few:
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=dtype)
    over = tuple(tuple(range(y.ndim - axes, y.ndim)) for y in (weight, x))
    y = jnp.tensordot(weight, x, (over[0], over[1]), preferred_element_type=dtype)
    # Without the barrier, XLA may exchange the operands and copy the weight in every step.
    y = jax.lax.optimization_barrier(y) if few else y
    return jnp.moveaxis(y, range(len(out)), range(-len(out), 0))


def _product_on_cpu(weight: Float[Array, "o i"], x: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
    """`product` with a matrix on a CPU, for many rows or bfloat16, in float32.

    XLA uses the processor's instructions for bfloat16 if the weight is a matrix, the result may be float32, and there
    are two rows at least; few rows are faster if the weight comes first. On a Xeon with AMX, products of a prompt take
    a quarter, and those of one token a seventh, of the time of a plain einsum.
    """
    rows = math.prod(x.shape[:-1])
    if rows >= _MANY:
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
    at_least_two = jnp.concatenate([x.reshape(1, -1), jnp.zeros((1, x.shape[-1]), x.dtype)]) if rows == 1 else x
    y = jnp.tensordot(weight, at_least_two, (1, at_least_two.ndim - 1), preferred_element_type=jnp.float32)
    return y[:, 0].reshape(*x.shape[:-1], -1) if rows == 1 else jnp.moveaxis(y, 0, -1)


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + weight).

    Normalises in float32. Without an offset, it casts to the dtype of x and then multiplies by the weight (Llama); with
    one, also with 0, it multiplies first (Gemma).
    """

    def __init__(self, width: int, eps: float, *, offset: float | None = None, init: Initializer) -> None:
        self.weight = init.constant(1.0 - (offset or 0.0), width)
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis."""
        if self.offset is None:
            return rms_normalised(x, self.eps) * self.weight[...]
        x32 = rms_normalised(x.astype(jnp.float32), self.eps)
        return (x32 * (self.offset + self.weight[...].astype(jnp.float32))).astype(x.dtype)


def rms_normalised(x: Float[Array, "*batch D"], eps: float) -> Float[Array, "*batch D"]:
    """x / rms(x) over the last axis, computed in float32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / std * weight + bias, statistics in float32."""

    def __init__(self, width: int, eps: float, *, init: Initializer) -> None:
        self.weight = init.constant(1.0, width)
        self.bias = init.constant(0.0, width)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return x32.astype(x.dtype) * self.weight[...] + self.bias[...]


class Embedding(nnx.Module):
    """A table of vectors, one per id, which are multiplied by `scale`."""

    def __init__(self, count: int, width: int, *, scale: float = 1.0, init: Initializer) -> None:
        self.weight = init.normal(count, width, scale=0.02)
        self.scale = scale

    def __call__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Looks the ids up."""
        table, ids = beside(self.weight[...], ids)
        x = table[ids]
        return x if self.scale == 1 else x * jnp.asarray(self.scale, x.dtype)


def gelu(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """The exact GELU, with erf."""
    return jax.nn.gelu(x, approximate=False)


def quick_gelu(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """x sigmoid(1.702 x), an approximation of GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}


class Mlp(nnx.Module):
    """Linear, exact GELU, linear: the projector of most families."""

    def __init__(self, width_in: int, width: int, width_out: int, *, bias: bool = True, init: Initializer) -> None:
        self.first = Linear(width_in, width, bias=bias, init=init)
        self.second = Linear(width, width_out, bias=bias, init=init)

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
        """Maps the last axis."""
        return self.second(gelu(self.first(x)))


class GatedMlp(nnx.Module):
    """A gated MLP with SiLU, without biases."""

    def __init__(self, width: int, channels: int, *, init: Initializer) -> None:
        self.gate = Linear(width, channels, bias=False, init=init)
        self.up = Linear(width, channels, bias=False, init=init)
        self.down = Linear(channels, width, bias=False, init=init)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Maps the last axis."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class LayerInputs(nnx.Module):
    """Vectors of each token for every layer, mixed into the layer's output (per-layer embeddings: Gemma 3n, Gemma 4).

    They are the mean of a row of a table, which depends on the token's id, and of a projection of the first layer's
    input. L layers, C channels of a vector.
    """

    def __init__(self, c: DecoderConfig, *, init: Initializer) -> None:
        vectors = c.layer_inputs
        assert vectors is not None
        self.table = Embedding(vectors.vocab_size, c.layers * vectors.width, scale=vectors.width**0.5, init=init)
        self.projection = Linear(c.width, c.layers * vectors.width, bias=False, init=init)
        self.norm = RMSNorm(vectors.width, c.norm_eps, offset=c.norm_offset, init=init)
        self.layers, self.pad = c.layers, vectors.pad

    def __call__(
        self, ids: Int[Array, "B T"], x: Float[Array, "B T D"], is_vision: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B L T C"]:
        """The vectors, from ids and the input of the first layer. Vision tokens have the row of the id `pad`."""
        ids = ids if is_vision is None else jnp.where(is_vision, self.pad, ids)
        by_id, projected = (
            rearrange(y, "b t (l c) -> b l t c", l=self.layers)
            for y in (self.table(ids), self.projection(x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype))
        )
        return (self.norm(projected) + by_id) * jnp.asarray(2**-0.5, x.dtype)


class MixLayerInput(nnx.Module):
    """Adds a token's vector for one layer to the layer's output: gated by the output, projected, and normalised."""

    def __init__(self, c: DecoderConfig, *, init: Initializer) -> None:
        assert c.layer_inputs is not None
        self.gate = Linear(c.width, c.layer_inputs.width, bias=False, init=init)
        self.projection = Linear(c.layer_inputs.width, c.width, bias=False, init=init)
        self.norm = RMSNorm(c.width, c.norm_eps, offset=c.norm_offset, init=init)
        self.activation = c.activation

    def __call__(self, x: Float[Array, "B T D"], given: Float[Array, "B T C"]) -> Float[Array, "B T D"]:
        """Mixes the vectors of the tokens into the layer's output."""
        return x + self.norm(self.projection(ACTIVATIONS[self.activation](self.gate(x)) * given.astype(x.dtype)))
