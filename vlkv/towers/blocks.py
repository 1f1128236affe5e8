"""The blocks that towers share, which differ only in settings of their config.

Axes: I images · V patches and the class token, if there is one · N heads · H head dim · D width.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from vlkv.decoder.layers import Initializer, JoinHeads, LayerNorm, Linear, RMSNorm, SplitHeads, gelu, quick_gelu
from vlkv.decoder.rope import apply_rope
from vlkv.sharding.ops import attention_mass, by_row, prefill_attention

_ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu, "gelu_pytorch_tanh": jax.nn.gelu, "silu": jax.nn.silu}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The blocks of a tower. Settings that all towers of one kind share are class variables.

    A derived config in which such a setting varies declares it as a field: `norm_eps: float = dataclasses.field()`.
    This also removes the default, so each config must set it.
    """

    width: int
    mlp_width: int
    layers: int
    heads: int

    activation: ClassVar[str] = "gelu"
    gated: ClassVar[bool] = False  # the MLP has a gate, and the activation is applied to the gate
    norm: ClassVar[str] = "layer_norm"
    norm_eps: ClassVar[float] = 1e-6
    qkv_bias: ClassVar[bool] = True
    out_bias: ClassVar[bool] = True
    mlp_bias: ClassVar[bool] = True
    qk_norm_eps: ClassVar[float | None] = None  # None: queries and keys are not normalised
    qk_norm_by_head: ClassVar[bool] = False  # each head is normalised by itself, with the same weights
    scaled: ClassVar[bool] = False  # a learnt factor per channel for the output of attention and of the MLP

    @property
    def blocks(self) -> int:
        """Number of blocks that run."""
        return self.layers

    def make_norm(self, *, init: Initializer) -> LayerNorm | RMSNorm:
        """A norm of the kind that the blocks use."""
        return (RMSNorm if self.norm == "rms_norm" else LayerNorm)(self.width, self.norm_eps, init=init)


class VitBlock(nnx.Module):
    """Pre-norm attention over all patches, then an MLP."""

    def __init__(self, c: BlockConfig, *, init: Initializer) -> None:
        head_dim = c.width // c.heads
        self.attention_norm = c.make_norm(init=init)
        self.query = SplitHeads(c.width, c.heads, head_dim, bias=c.qkv_bias, init=init)
        self.key = SplitHeads(c.width, c.heads, head_dim, bias=c.qkv_bias, init=init)
        self.value = SplitHeads(c.width, c.heads, head_dim, bias=c.qkv_bias, init=init)
        eps, normed = c.qk_norm_eps, head_dim if c.qk_norm_by_head else c.width
        self.query_norm = None if eps is None else RMSNorm(normed, eps, init=init)
        self.key_norm = None if eps is None else RMSNorm(normed, eps, init=init)
        self.out = JoinHeads(c.width, c.heads, head_dim, bias=c.out_bias, init=init)
        self.attention_scale = init.constant(0.1, c.width) if c.scaled else None
        self.mlp_norm = c.make_norm(init=init)
        self.gate = Linear(c.width, c.mlp_width, bias=c.mlp_bias, init=init) if c.gated else None
        self.up = Linear(c.width, c.mlp_width, bias=c.mlp_bias, init=init)
        self.down = Linear(c.mlp_width, c.width, bias=c.mlp_bias, init=init)
        self.mlp_scale = init.constant(0.1, c.width) if c.scaled else None
        self.activation = c.activation

    @jax.jit
    def __call__(
        self,
        x: Float[Array, "I V D"],
        rotation: Float[Array, "I V 1 H"] | None = None,
        valid: Bool[Array, "I V"] | None = None,
    ) -> Float[Array, "I V D"]:
        """One block.

        `rotation`: table for `apply_rope`; None: no rotation. `valid`: False for padding; None: no padding.
        """
        h = self.attention_norm(x)
        q, k = _normalised(self.query_norm, self.query(h)), _normalised(self.key_norm, self.key(h))
        if rotation is not None:
            q, k = apply_rope(q, rotation), apply_rope(k, rotation)
        attended = prefill_attention(q, k, self.value(h), valid=valid, causal=False)
        x = x + _times(self.attention_scale, self.out(attended))
        h, activation = self.mlp_norm(x), _ACTIVATIONS[self.activation]
        h = activation(self.up(h)) if self.gate is None else activation(self.gate(h)) * self.up(h)
        return x + _times(self.mlp_scale, self.down(h))

    def received_attention(
        self,
        x: Float[Array, "I V D"],
        rotation: Float[Array, "I V 1 H"] | None = None,
        valid: Bool[Array, "I V"] | None = None,
        *,
        rows: int | None = None,
    ) -> Float[Array, "I N V"]:
        """The attention that patches receive, summed over the first `rows` queries (1: the class token; None: all)."""
        h = self.attention_norm(x)
        q, k = _normalised(self.query_norm, self.query(h[:, :rows])), _normalised(self.key_norm, self.key(h))
        if rotation is not None:
            q, k = apply_rope(q, rotation[:, :rows]), apply_rope(k, rotation)
        return received(q, k, jnp.ones(x.shape[:2], bool) if valid is None else valid)


def received(q: Float[Array, "I _rows N H"], k: Float[Array, "I V N H"], valid: Bool[Array, "I V"]) -> Array:
    """The attention that keys receive from the queries of the first patches, [I, N, V]; `valid`: False for padding."""

    def of_image(q: Float[Array, "N _rows H"], k: Float[Array, "N V H"], valid: Bool[Array, " V"]) -> Array:
        weight = valid[None, : q.shape[1]].astype(jnp.float32)
        return attention_mass(q, k, row_weight=weight, key_mask=valid, causal=False)[0]

    return by_row(of_image, len(q))(jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2), valid)


def _normalised(norm: RMSNorm | None, x: Float[Array, "I V N H"]) -> Float[Array, "I V N H"]:
    """`x` normalised over all heads together or over each head, depending on the norm's width; `x` if it is None."""
    return x if norm is None else norm(x.reshape(*x.shape[:2], -1, norm.weight.shape[0])).reshape(x.shape)


def _times(scale: nnx.Param | None, x: Float[Array, "I V D"]) -> Float[Array, "I V D"]:
    return x if scale is None else scale[...] * x
