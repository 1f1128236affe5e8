"""The vision tower of Gemma 4: patches of images of any size, positions from two tables and from 2-D RoPE.

A block has RMSNorms before and after attention and MLP, and normalises queries, keys and values of each head. Attention
does not divide by sqrt(H). The first half of a head's channels is rotated by the column, the second by the line.

Axes: F images · n patches of an image with padding · C values of a patch · D width · N heads · H head dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from einops import reduce
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer, JoinHeads, Linear, RMSNorm, SplitHeads, rms_normalised
from vlkv.decoder.rope import apply_rope, cosines_and_sines
from vlkv.families.models import NativeModel
from vlkv.inputs import Inputs
from vlkv.sharding.ops import prefill_attention
from vlkv.towers.blocks import received
from vlkv.towers.native import NativeConfig, NativeTower

_FAR = 3e38  # a bound that clips nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(NativeConfig):
    """A tower with gated MLPs and more norms."""

    table: int  # lines, and columns, in the tables of positions
    clipped: bool  # inputs and outputs of the products are clipped to bounds of the checkpoint
    standardised: bool  # the checkpoint has a bias and a scale for the channels of a token
    norm_eps: float = dataclasses.field()

    def norm_of(self, width: int, *, init: Initializer) -> RMSNorm:
        """An RMSNorm that multiplies by its weights in float32."""
        return RMSNorm(width, self.norm_eps, offset=0.0, init=init)


class Bounds(nnx.Module):
    """The bounds of a product's inputs and outputs. A bound that clips nothing may be infinite (`unbounded`)."""

    def __init__(self, *, init: Initializer) -> None:
        self.input_min, self.output_min = init.constant(-_FAR), init.constant(-_FAR)
        self.input_max, self.output_max = init.constant(_FAR), init.constant(_FAR)
        for least, most in ((self.input_min, self.input_max), (self.output_min, self.output_max)):
            least.set_metadata(unbounded=-jnp.inf)
            most.set_metadata(unbounded=jnp.inf)

    def __call__(self, product: Any, x: Float[Array, "*batch i"]) -> Float[Array, "..."]:
        """The product of clipped inputs, clipped."""
        y = product(jnp.clip(x, self.input_min[...], self.input_max[...]))
        return jnp.clip(y, self.output_min[...], self.output_max[...])


class Gemma4Block(nnx.Module):
    """Attention over all patches of an image, then a gated MLP."""

    def __init__(self, c: Gemma4VisionConfig, *, init: Initializer) -> None:
        head_dim = c.width // c.heads
        self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm = (
            c.norm_of(c.width, init=init) for _ in range(4)
        )
        self.query, self.key, self.value = (
            SplitHeads(c.width, c.heads, head_dim, bias=False, init=init) for _ in range(3)
        )
        self.query_norm, self.key_norm = c.norm_of(head_dim, init=init), c.norm_of(head_dim, init=init)
        self.out = JoinHeads(c.width, c.heads, head_dim, bias=False, init=init)
        self.gate = Linear(c.width, c.mlp_width, bias=False, init=init)
        self.up = Linear(c.width, c.mlp_width, bias=False, init=init)
        self.down = Linear(c.mlp_width, c.width, bias=False, init=init)
        self.query_bounds, self.key_bounds, self.value_bounds, self.out_bounds = (
            Bounds(init=init) if c.clipped else None for _ in range(4)
        )
        self.gate_bounds, self.up_bounds, self.down_bounds = (
            Bounds(init=init) if c.clipped else None for _ in range(3)
        )
        self.eps = c.norm_eps

    @jax.jit
    def __call__(
        self, x: Float[Array, "F n D"], rotation: tuple[Array, Array], valid: Bool[Array, "F n"]
    ) -> Float[Array, "F n D"]:
        """One block. `rotation`: tables for `apply_rope`, of columns and of lines; `valid`: False for padding."""
        h = self.attention_norm(x)
        v = rms_normalised(_bounded(self.value_bounds, self.value, h), self.eps)
        attended = prefill_attention(*self._rotated(h, rotation), v, valid=valid, causal=False)
        flat = attended.astype(x.dtype).reshape(*x.shape[:2], -1)

        def join(y: Float[Array, "F n _"]) -> Float[Array, "F n D"]:
            return self.out(y.reshape(attended.shape))

        x = x + self.attention_out_norm(_bounded(self.out_bounds, join, flat))
        h = self.mlp_norm(x)
        h = jax.nn.gelu(_bounded(self.gate_bounds, self.gate, h)) * _bounded(self.up_bounds, self.up, h)
        return x + self.mlp_out_norm(_bounded(self.down_bounds, self.down, h))

    def received_attention(
        self, x: Float[Array, "F n D"], rotation: tuple[Array, Array], valid: Bool[Array, "F n"]
    ) -> Float[Array, "F N n"]:
        """The attention that every patch receives in this block, summed over all patches."""
        return received(*self._rotated(self.attention_norm(x), rotation), valid)

    def _rotated(
        self, h: Float[Array, "F n D"], rotation: tuple[Array, Array]
    ) -> tuple[Float[Array, "F n N H"], Float[Array, "F n N H"]]:
        """Queries, multiplied by the sqrt(H) that attention divides by, and keys."""

        def rotate(y: Float[Array, "F n N H"]) -> Float[Array, "F n N H"]:
            halves = jnp.split(y, 2, axis=-1)
            return jnp.concatenate([apply_rope(*pair) for pair in zip(halves, rotation, strict=True)], axis=-1)

        q = rotate(self.query_norm(_bounded(self.query_bounds, self.query, h)))
        k = rotate(self.key_norm(_bounded(self.key_bounds, self.key, h)))
        return q * jnp.asarray(q.shape[-1] ** 0.5, q.dtype), k


def _bounded(bounds: Bounds | None, product: Any, x: Float[Array, "F n i"]) -> Float[Array, "..."]:
    return product(x) if bounds is None else bounds(product, x)


class Gemma4Tower(NativeTower):
    """Patch embedding with positions, and blocks."""

    config: Gemma4VisionConfig
    block = Gemma4Block

    def __init__(self, c: Gemma4VisionConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.positions = init.normal(2, c.table, c.width, scale=0.02)  # of columns and of lines
        self.bias = init.constant(0.0, c.width) if c.standardised else None
        self.scale = init.constant(1.0, c.width) if c.standardised else None

    @override
    def embed(self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"]) -> Float[Array, "F n D"]:
        line, column = jnp.moveaxis(jnp.maximum(place, 0), -1, 0)
        return self.patch(2 * (pixels - 0.5)) + self.positions[0, column] + self.positions[1, line]

    @override
    def rotation(self, angles: Float[Array, "F n 2 pairs"]) -> tuple[Array, Array]:
        return cosines_and_sines(angles[..., 1, :]), cosines_and_sines(angles[..., 0, :])


class Gemma4(NativeModel):
    """The patches of a token are averaged, standardised, normalised and projected."""

    tower = Gemma4Tower

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return Linear(config.vision.width, config.decoder.width, bias=False, init=init)

    @override
    def project(self, features: list[Float[Array, "F n d"]], inputs: Inputs) -> Float[Array, "R D"]:
        c, tower = self.config.vision, self.vision
        # In float32, because sqrt(width) makes features large, and the bias makes them small again.
        x = reduce(features[-1].astype(jnp.float32), "f (v u) d -> (f v) d", "mean", u=c.merge**2) * c.width**0.5
        if tower.bias is not None:
            x = (x - tower.bias[...].astype(jnp.float32)) * tower.scale[...].astype(jnp.float32)
        return self.projector(rms_normalised(x.astype(features[-1].dtype), c.norm_eps))
