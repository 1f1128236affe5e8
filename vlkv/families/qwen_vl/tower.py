"""Qwen-VL's tower: OpenCLIP's ViT without a class token, and a resampler from its patches to tokens.

Axes: I images · V patches · v tokens · N heads · H head dim · D width. Two details of the authors' code are kept:
position embeddings are stored for 16 x 16 patches and resized to the grid by bicubic interpolation (torch's, with
a = -0.75 and corners not aligned); the resampler adds position embeddings to queries and keys, not to values.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.decoder.layers import Initializer, JoinHeads, LayerNorm, Linear, SplitHeads
from vlkv.families.glm.tower import cubic_weights
from vlkv.towers.vit import Vit, VitConfig

RESAMPLER_HEAD_DIM = 128
_STORED = 16  # position embeddings per side in the checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVlTowerConfig(VitConfig):
    """OpenCLIP's ViT and a resampler to a square of tokens."""

    side: int  # tokens per side of an image
    resampler_heads: int
    norm_eps: float = 1e-6
    feature_layer: int = -1

    patch_bias = False
    first_norm = True

    @property
    @override
    def positions(self) -> int:
        return _STORED**2

    @property
    @override
    def tokens(self) -> int:
        return self.side**2

    @property
    def out_width(self) -> int:
        """The decoder's width."""
        return self.resampler_heads * RESAMPLER_HEAD_DIM


class Resampler(nnx.Module):
    """Cross-attention from learnt queries, which have positions on a square, to all patches."""

    def __init__(self, c: QwenVlTowerConfig, *, init: Initializer) -> None:
        width, head_dim = c.out_width, RESAMPLER_HEAD_DIM
        self.tokens = init.normal(c.tokens, width, scale=0.02)
        self.position = init.normal(c.tokens, width, scale=0.02)
        self.inner = None if c.width == width else Linear(c.width, width, bias=False, init=init)
        self.query_norm = LayerNorm(width, c.norm_eps, init=init)
        self.key_norm = LayerNorm(width, c.norm_eps, init=init)
        self.query = SplitHeads(width, c.resampler_heads, head_dim, bias=True, init=init)
        self.key = SplitHeads(width, c.resampler_heads, head_dim, bias=True, init=init)
        self.value = SplitHeads(width, c.resampler_heads, head_dim, bias=True, init=init)
        self.out = JoinHeads(width, c.resampler_heads, head_dim, bias=True, init=init)
        self.grid = c.grid

    def __call__(self, x: Float[Array, "I V C"]) -> tuple[Float[Array, "I v D"], Float[Array, "I N v V"]]:
        """Tokens in raster order of the queries' square, and the attention weights from tokens to patches."""
        x = self.key_norm(x if self.inner is None else self.inner(x))
        position = self.position[...]
        q = self.query(self.query_norm(self.tokens[...]) + position)  # [v, N, H]
        k, value = self.key(x + resized(position, self.grid)), self.value(x)
        logits = jnp.einsum("tnh,ivnh->intv", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
        return self.out(jnp.einsum("intv,ivnh->itnh", weights, value)), weights


class QwenVlTower(Vit):
    """ViT, resampler, a last norm and a last linear map."""

    config: QwenVlTowerConfig

    def __init__(self, c: QwenVlTowerConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.resampler = Resampler(c, init=init)
        self.last_norm = LayerNorm(c.out_width, c.norm_eps, init=init)
        self.last = init.normal(c.out_width, c.out_width, scale=c.out_width**-0.5)  # [in, out]

    def with_attention(
        self, pixels: Float[Array, "I 3 h w"], blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "I v D"], list[Float[Array, "I N v"]]]:
        """Tokens of every image, in the decoder's width, and the attention that they receive in the given blocks.

        The attention of a token is the weighted sum over patches of the attention that the patches receive; the weights
        are the resampler's attention from the token to the patches, averaged over heads.
        """
        x, received = super().with_attention(pixels, blocks)
        x, weights = self.resampler(x)
        tokens = jnp.einsum("ivd,de->ive", self.last_norm(x), self.last[...])
        return tokens, [jnp.einsum("itv,inv->int", jnp.mean(weights, axis=1), attention) for attention in received]

    @override
    def make_position_embedding(self, c: VitConfig, *, init: Initializer) -> nnx.Param:
        return init.normal(c.positions, c.width, scale=c.width**-0.5)

    @override
    def position_embedding(self) -> Float[Array, "V D"]:
        return resized(self.position[...], self.config.grid)


def resized(table: Float[Array, "V D"], side: int) -> Float[Array, "V2 D"]:
    """A square of vectors, resized to `side` x `side` by bicubic interpolation in float32."""
    stored = round(table.shape[0] ** 0.5)
    if stored == side:
        return table
    weights = cubic_weights(jnp.arange(side)[None], stored)[0]
    square = table.astype(jnp.float32).reshape(stored, stored, -1)
    result = jnp.einsum("ya,xb,abd->yxd", weights, weights, square, precision="highest")
    return result.reshape(side**2, -1).astype(table.dtype)
