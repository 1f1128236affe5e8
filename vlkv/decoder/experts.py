"""A mixture of experts in place of a layer's MLP, as in Qwen3-MoE: each token passes through its `active` best experts.

The result is exact for every batch: no expert has a capacity, so no token is dropped. The tokens of all rows are sorted
by expert. A TPU multiplies the groups with `jax.lax.ragged_dot`. Elsewhere this op would multiply every token with every
expert, so a loop takes the groups in blocks, which reads only experts that have a token.

Axes: B batch · T tokens · D width · E experts · A active experts of a token · F channels of an expert · n tokens of all
rows · m = n A rows, sorted by expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from vlkv.config import ExpertsConfig
from vlkv.decoder.layers import Initializer, Linear
from vlkv.sharding.ops import sum_over_channels

_LARGEST_BLOCK = 128  # rows that one step of the loop multiplies with an expert
_SMALLEST_BLOCK = 4


class Stack(nnx.Module):
    """The weight [E, out, in] of one linear map per expert."""

    def __init__(self, count: int, width_in: int, width_out: int, *, init: Initializer) -> None:
        self.weight = init.normal(count, width_out, width_in, scale=width_in**-0.5)


class Experts(nnx.Module):
    """A router, and gated MLPs."""

    def __init__(self, width: int, c: ExpertsConfig, *, init: Initializer) -> None:
        self.router = Linear(width, c.count, bias=False, init=init)
        self.gate = Stack(c.count, width, c.width, init=init)
        self.up = Stack(c.count, width, c.width, init=init)
        self.down = Stack(c.count, c.width, width, init=init)
        self.active, self.normalised = c.active, c.normalised

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The weighted sum of each token's active experts."""
        share, chosen = self.choose(x)
        weights = (self.gate.weight[...], self.up.weight[...], self.down.weight[...])
        return sum_over_channels(apply_experts, (x, share, chosen), weights)

    def choose(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T A"], Int[Array, "B T A"]]:
        """The active experts of each token and their shares, by the router's softmax over all experts.

        If `normalised`, the shares of a token sum to 1.
        """
        probability = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
        share, chosen = jax.lax.top_k(probability, self.active)
        if self.normalised:
            share = share / jnp.sum(share, axis=-1, keepdims=True)
        return share.astype(x.dtype), chosen


def apply_experts(
    tokens: tuple[Float[Array, "B T D"], Float[Array, "B T A"], Int[Array, "B T A"]],
    weights: tuple[Float[Array, "E F D"], Float[Array, "E F D"], Float[Array, "E D F"]],
) -> Float[Array, "B T D"]:
    """The sum over each token's experts of share * MLP.

    Args:
        tokens: inputs, and shares and numbers of the experts that each token passes through.
        weights: of gate, up and down; all of their channels F, or some for a part of the sum.
    """
    x, share, chosen = tokens
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert, stable=True)  # [m]
    sizes = jnp.bincount(expert, length=weights[0].shape[0])
    rows = x.reshape(-1, x.shape[-1])[order // share.shape[-1]]
    made = jax.lax.platform_dependent(rows, sizes, *weights, tpu=_ragged, default=_in_blocks)
    each = made[jnp.argsort(order)].reshape(*share.shape, x.shape[-1])
    return jnp.einsum("bta,btad->btd", share, each, preferred_element_type=jnp.float32).astype(x.dtype)


def _ragged(
    rows: Float[Array, "m D"],
    sizes: Int[Array, " E"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
) -> Float[Array, "m D"]:
    """The MLP of each row's expert; the rows are sorted by expert, and expert e has `sizes[e]` of them."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )

    def product(x: Array, weight: Array) -> Array:
        return jax.lax.ragged_dot_general(x, weight, sizes, numbers)

    return product(jax.nn.silu(product(rows, gate)) * product(rows, up), down)


def _in_blocks(
    rows: Float[Array, "m D"],
    sizes: Int[Array, " E"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
) -> Float[Array, "m D"]:
    """`_ragged` as a loop over blocks of rows of one expert. The last block of an expert may be partly empty."""
    count, experts = len(rows), len(sizes)
    size = _block_size(count, experts)
    blocks = -(-sizes // size)  # of each expert
    last = jnp.cumsum(blocks)
    most = (count + min(count, experts) * (size - 1)) // size  # blocks that all experts together may have
    number = jnp.arange(most)
    expert = jnp.minimum(jnp.searchsorted(last, number, side="right"), experts - 1)
    start = (jnp.cumsum(sizes) - sizes)[expert] + (number - (last - blocks)[expert]) * size
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def mlp(expert: Array, start: Array) -> Array:
        x = jax.lax.dynamic_slice_in_dim(padded, start, size)
        return (jax.nn.silu(x @ gate[expert].T) * (x @ up[expert].T)) @ down[expert].T

    def step(block: tuple[Array, Array, Array]) -> Array:
        used, expert, start = block
        return jax.lax.cond(used, mlp, lambda expert, start: jnp.zeros_like(padded[:size]), expert, start)

    made = jax.lax.map(step, (number < last[-1], expert, start))
    row = jnp.arange(count)
    block = jnp.searchsorted(jnp.where(number < last[-1], start, count), row, side="right") - 1
    return made[block, row - start[block]]


def _block_size(rows: int, experts: int) -> int:
    """Rows of a block: a power of two near the mean number of rows per expert."""
    mean = max(1, rows // experts)
    return max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, 1 << (mean - 1).bit_length()))
