"""A mixture of experts in place of a layer's MLP, as in Qwen3-MoE: each token passes through its `active` best experts.

In Gemma 4 it is beside the MLP, and its router normalises and scales its input, and the shares.

The result is exact for every batch: no expert has a capacity, so no token is dropped. The tokens of all rows are sorted
by expert. A TPU multiplies the groups with jax's grouped kernel; `jax.lax.ragged_dot` would copy all weights first, to
exchange their axes. Elsewhere `ragged_dot` multiplies every token with every expert, so a loop takes the groups in
blocks. Both read only experts that have a token. Long prompts pass in blocks of tokens, because each token takes the
memory of A sorted rows.

Axes: B batch · T tokens · D width · E experts, e of them on a device · A active experts of a token · F channels of an
expert · n tokens of all rows, or of a block · m = n A rows, sorted by expert.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import choose
from vlkv.config import ExpertsConfig
from vlkv.decoder.layers import ACTIVATIONS, GatedMlp, Initializer, Linear, rms_normalised
from vlkv.sharding.mixtures import sum_over_experts

# Rows that one step of the loop multiplies with an expert. XLA on a CPU reads an expert four times as fast for a single
# row as for several, because it then does not copy the weights first.
_BLOCKS = (16, 32, 64, 128)
# Rows per expert of a block of tokens, on average. Each block reads all weights, so there are enough rows that a chip
# multiplies for longer than it reads (on a TPU v5e from 240 rows on).
_ROWS = 512

Up = Float[Array, "e F D"]  # weights of some experts, also of their gates
Down = Float[Array, "e D F"]
Rows = Float[Array, "m D"]
Sizes = Int[Array, " e"]  # number of rows of each expert
Weights = tuple[Up, Up, Down, Float[Array, " e"]]  # the last are factors of the shares


class Experts(nnx.Module):
    """A router, and the weights of all gated MLPs, in [out, in] order."""

    def __init__(self, width: int, c: ExpertsConfig, *, eps: float = 1e-6, init: Initializer) -> None:
        self.router = Linear(width, c.count, bias=False, init=init)
        self.router_scale = init.constant(1.0, width) if c.beside else None
        self.share_scale = init.constant(1.0, c.count) if c.beside else None
        self.gate = init.normal(c.count, c.width, width, scale=width**-0.5)
        self.up = init.normal(c.count, c.width, width, scale=width**-0.5)
        self.down = init.normal(c.count, width, c.width, scale=c.width**-0.5)
        self.active, self.normalised, self.activation, self.eps = c.active, c.normalised, c.activation, eps
        self.shared = None if c.shared is None else GatedMlp(width, c.shared, init=init)
        self.shared_gate = None if c.shared is None else Linear(width, 1, bias=False, init=init)

    def __call__(self, x: Float[Array, "B T D"], before: Float[Array, "B T D"] | None = None) -> Float[Array, "B T D"]:
        """The weighted sum of each token's active experts, and of the shared one. `before`: input of the router."""
        weights = (self.gate[...], self.up[...], self.down[...])
        seen = x if before is None else before
        if self.router_scale is not None:
            scale = self.router_scale[...].astype(jnp.float32) * seen.shape[-1] ** -0.5
            seen = (rms_normalised(seen, self.eps).astype(jnp.float32) * scale).astype(seen.dtype)
        # On each device for its own rows, because XLA does not split `top_k` over devices.
        apply = partial(apply_experts, active=self.active, normalised=self.normalised, activation=self.activation)
        share_scale = jnp.ones(len(weights[0])) if self.share_scale is None else self.share_scale[...]
        chosen = sum_over_experts(apply, (x, self.router(seen)), (*weights, share_scale))
        if self.shared is None or self.shared_gate is None:
            return chosen
        return chosen + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)


def apply_experts(
    tokens: tuple[Float[Array, "B T D"], Float[Array, "B T E"]],
    weights: Weights,
    first: Array | int = 0,
    *,
    active: int,
    normalised: bool,
    activation: str = "silu",
) -> Float[Array, "B T D"]:
    """The sum over each token's active experts of share * MLP. Shares are the softmax of the logits of all experts.

    `tokens` are inputs, and logits of the router. `weights` are those of gate, up and down of all experts and channels,
    or of the experts from `first` on, for their part of the sum; the last are factors of the shares.
    """
    flat = (tokens[0].reshape(-1, tokens[0].shape[-1]), tokens[1].reshape(-1, tokens[1].shape[-1]))
    run = partial(_apply, weights=weights, first=first, active=active, normalised=normalised, activation=activation)
    count, most = len(flat[0]), max(1, _ROWS * tokens[1].shape[-1] // active)
    if count <= most:
        return run(flat).reshape(tokens[0].shape)
    blocks = -(-count // most)
    size = -(-count // blocks)
    cut = [jnp.pad(x, ((0, blocks * size - count), (0, 0))).reshape(blocks, size, -1) for x in flat]
    return jax.lax.map(run, tuple(cut)).reshape(blocks * size, -1)[:count].reshape(tokens[0].shape)


def _apply(
    tokens: tuple[Float[Array, "n D"], Float[Array, "n E"]],
    weights: Weights,
    first: Array | int,
    *,
    active: int,
    normalised: bool,
    activation: str,
) -> Float[Array, "n D"]:
    """`apply_experts` for one block of tokens."""
    (x, logits), count = tokens, len(weights[0])
    share, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), active)
    if normalised:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    local = (chosen >= first) & (chosen < first + count)
    expert = jnp.where(local, chosen - first, count).reshape(-1)  # those of other devices are sorted to the end
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=count)
    run = partial(choose("experts", _PRODUCTS, None, "xla"), activation=activation)
    outputs = run(x[order // active], sizes, *weights[:3])
    each = outputs[jnp.argsort(order)].reshape(*chosen.shape, x.shape[-1])
    each = jnp.where(local[..., None], each, 0)
    share = share * weights[3][jnp.where(local, chosen - first, 0)]
    return jnp.einsum("na,nad->nd", share.astype(x.dtype), each, preferred_element_type=jnp.float32).astype(x.dtype)


def _in_groups(
    rows: Rows, sizes: Sizes, gate: Up, up: Up, down: Down, *, activation: str = "silu", interpret: bool = False
) -> Rows:
    """The MLP of each row's expert; the rows are sorted by expert, and expert i has `sizes[i]` of them.

    Rows beyond the last expert's have undefined results.
    """
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # noqa: PLC0415 (slow to import)

    count = len(rows)
    height = min(_BLOCKS[-1], -(-count // 8) * 8)
    padded = jnp.pad(rows, ((0, -count % height), (0, 0)))

    def product(x: Array, weight: Array) -> Array:
        out, inner = weight.shape[1:]
        tiles = (height, min(inner, 1024), min(out, 512))
        return gmm(x, weight, sizes.astype(jnp.int32), x.dtype, tiles, transpose_rhs=True, interpret=interpret)

    return product(ACTIVATIONS[activation](product(padded, gate)) * product(padded, up), down)[:count]


def _in_blocks(rows: Rows, sizes: Sizes, gate: Up, up: Up, down: Down, *, activation: str = "silu") -> Rows:
    """`_in_groups` as a loop over blocks of rows of one expert. The last block of an expert may be partly empty."""
    count, experts = len(rows), len(sizes)
    size = _block_size(count, experts)
    blocks = -(-sizes // size)  # of each expert
    last = jnp.cumsum(blocks)
    number = jnp.arange((count + min(count, experts) * (size - 1)) // size)  # so many blocks in any case
    used = number < last[-1]
    expert = jnp.minimum(jnp.searchsorted(last, number, side="right"), experts - 1)
    start = (jnp.cumsum(sizes) - sizes)[expert] + (number - (last - blocks)[expert]) * size
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def mlp(expert: Array, start: Array) -> Array:
        x = jax.lax.dynamic_slice_in_dim(padded, start, size)
        return (ACTIVATIONS[activation](x @ gate[expert].T) * (x @ up[expert].T)) @ down[expert].T

    def step(block: tuple[Array, Array, Array]) -> Array:
        used, expert, start = block
        return jax.lax.cond(used, mlp, lambda expert, start: jnp.zeros_like(padded[:size]), expert, start)

    outputs = jax.lax.map(step, (used, expert, start))
    row = jnp.arange(count)
    block = jnp.searchsorted(jnp.where(used, start, count), row, side="right") - 1
    return outputs[block, row - start[block]]


def _block_size(rows: int, experts: int) -> int:
    """Rows of a block: 1, or about the mean number of rows per expert."""
    mean = rows // experts
    return 1 if mean <= 4 else next((size for size in _BLOCKS if size >= mean), _BLOCKS[-1])


_PRODUCTS = {"xla": _in_blocks, "mosaic_tpu": _in_groups}
