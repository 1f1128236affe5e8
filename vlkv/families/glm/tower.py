"""The vision towers of GLM-4.1V, GLM-4.6V-Flash and GLM-OCR, and what makes tokens of their patches.

Axes: F frames · n patches of a frame with padding · C values of a patch · D width · S positions per side of the table ·
m patches per side of a token.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int
from typing_extensions import override

from vlkv.decoder.layers import Embedding, GatedMlp, Initializer, LayerNorm, Linear, gelu
from vlkv.families.qwen2_vl.tower import Qwen2VisionConfig, Qwen2VlTower

_SHARPNESS = -0.75  # the parameter a of cubic convolution (Keys 1981, Eq. 4), as in torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmVisionConfig(Qwen2VisionConfig):
    """A tower with RMSNorms and gated MLPs.

    Attributes:
        table: positions per side of a square table that is added to the patches; None (GLM-OCR): there is none.
        merger_width: channels of the merger's gated MLP.
        qk_norm_eps: of the norms of queries and keys of each head; None (GLM-4.1V): there are none.
    """

    table: int | None
    merger_width: int
    norm_eps: float = dataclasses.field()
    qkv_bias: bool = dataclasses.field()
    out_bias: bool = dataclasses.field()
    mlp_bias: bool = dataclasses.field()
    qk_norm_eps: float | None = dataclasses.field()

    patch_bias = True
    qk_norm_by_head = True


class GlmTower(Qwen2VlTower):
    """Patch embedding, with a norm and positions if there is a table, and blocks."""

    config: GlmVisionConfig

    def __init__(self, c: GlmVisionConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.patch_norm = None if c.table is None else c.make_norm(init=init)
        self.positions = None if c.table is None else Embedding(c.table**2, c.width, init=init)

    @override
    def embed(self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"]) -> Float[Array, "F n D"]:
        x = self.patch(pixels)
        if self.config.table is None or self.positions is None or self.patch_norm is None:
            return x
        lines, columns = (cubic_weights(place[..., axis], self.config.table) for axis in (0, 1))
        weight = (lines[..., :, None] * columns[..., None, :]).reshape(*place.shape[:2], -1)
        at = jnp.einsum("fns,sd->fnd", weight, self.positions.weight[...].astype(jnp.float32))
        return self.patch_norm(x) + at.astype(x.dtype)


def cubic_weights(place: Int[Array, "F n"], table: int) -> Float[Array, "F n S"]:
    """Weights of a table's entries in bicubic interpolation along one axis, at the centres of the patches.

    The borders of a frame are at the borders of the table. Beyond them the table continues with its last entry, as
    torch's `grid_sample` does with `padding_mode="border"`.

    Args:
        place: line or column of each patch, -1 for padding, whose weights mean nothing.
        table: S.
    """
    count = jnp.max(place, axis=1, keepdims=True) + 1  # patches of the frame along this axis
    at = (place + 0.5) / jnp.maximum(count, 1) * table - 0.5
    taps = jnp.floor(at)[..., None] + jnp.arange(-1, 3)  # [F, n, 4]
    d, a = jnp.abs(at[..., None] - taps), _SHARPNESS
    near, far = ((a + 2) * d - (a + 3)) * d**2 + 1, a * (((d - 5) * d + 8) * d - 4)
    entry = jnp.clip(taps, 0, table - 1).astype(jnp.int32)
    taken = jax.nn.one_hot(entry, table)
    return jnp.einsum("fnt,fnts->fns", jnp.where(d <= 1, near, far), taken, precision="highest")


class Downsample(nnx.Module):
    """A convolution whose stride is the size of its kernel. Weight [out, in, m, m]."""

    def __init__(self, width_in: int, width_out: int, side: int, *, init: Initializer) -> None:
        self.weight = init.normal(width_out, width_in, side, side, scale=(width_in * side**2) ** -0.5)
        self.bias = init.constant(0.0, width_out)

    def __call__(self, x: Float[Array, "F n i"]) -> Float[Array, "V o"]:
        """One vector for m x m patches, which are neighbours in `x`."""
        side = self.weight.shape[-1]
        x = rearrange(x, "f (v a b) i -> (f v) a b i", a=side, b=side)
        return jnp.einsum("vabi,oiab->vo", x, self.weight[...]) + self.bias[...]


class GlmMerger(GatedMlp):
    """Norm, downsampling convolution, linear, LayerNorm, exact (erf) GELU, gated MLP."""

    def __init__(self, c: GlmVisionConfig, *, init: Initializer) -> None:
        self.norm = c.make_norm(init=init)
        self.downsample = Downsample(c.width, c.out_width, c.merge, init=init)
        self.linear = Linear(c.out_width, c.out_width, bias=False, init=init)
        self.linear_norm = LayerNorm(c.out_width, 1e-5, init=init)
        super().__init__(c.out_width, c.merger_width, init=init)

    def __call__(self, x: Float[Array, "F n i"]) -> Float[Array, "V D"]:
        """The vision embeddings of all frames in one list."""
        return super().__call__(gelu(self.linear_norm(self.linear(self.downsample(self.norm(x))))))
