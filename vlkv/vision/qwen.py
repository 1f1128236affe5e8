"""Qwen-VL's tower: OpenCLIP's ViT without a class token, and the resampler that reads its patches (Bai et al. 2023).

Axes: I images · V patches · v tokens · N heads · H head dim · D width. Quirks kept: positions are stored for 16 x 16
patches, whatever the grid, and enlarged bicubically (torch's: a = -0.75, corners not aligned); values of the resampler
see no positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import QwenVitConfig
from vlkv.layers import Initializer, JoinHeads, LayerNorm, Linear, SplitHeads
from vlkv.parallel import prefill_attention

_STORED = 16  # positions per side on disk


class QwenVitBlock(nnx.Module):
    """Pre-norm attention over all patches, then an MLP with the exact GELU."""

    def __init__(self, c: QwenVitConfig, *, init: Initializer) -> None:
        head_dim = c.width // c.heads
        self.attention_norm = LayerNorm(c.width, c.norm_eps, init=init)
        self.query = SplitHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.key = SplitHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.value = SplitHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.out = JoinHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.mlp_norm = LayerNorm(c.width, c.norm_eps, init=init)
        self.up = Linear(c.width, c.mlp_width, bias=True, init=init)
        self.down = Linear(c.mlp_width, c.width, bias=True, init=init)

    def __call__(self, x: Float[Array, "I V D"]) -> Float[Array, "I V D"]:
        """One block."""
        h = self.attention_norm(x)
        x = x + self.out(prefill_attention(self.query(h), self.key(h), self.value(h), causal=False))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=False))


class Resampler(nnx.Module):
    """One cross attention from learnt queries, which have places on a square, to all patches."""

    def __init__(self, c: QwenVitConfig, width: int, *, init: Initializer) -> None:
        head_dim = width // c.resampler_heads
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

    def __call__(self, x: Float[Array, "I V C"]) -> Float[Array, "I v D"]:
        """Patches to tokens, in raster order of the queries' own square."""
        x = self.key_norm(x if self.inner is None else self.inner(x))
        position = self.position[...]
        q = self.query(self.query_norm(self.tokens[...]) + position)  # [v, N, H]
        k, value = self.key(x + enlarged(position, self.grid)), self.value(x)
        logits = jnp.einsum("tnh,ivnh->intv", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
        return self.out(jnp.einsum("intv,ivnh->itnh", weights, value))


class QwenVit(nnx.Module):
    """Patches, blocks, resampler, a last norm and map."""

    def __init__(self, c: QwenVitConfig, width: int, *, init: Initializer) -> None:
        self.config = c
        self.patch = init.normal(c.width, 3, c.patch_size, c.patch_size, scale=(3 * c.patch_size**2) ** -0.5)
        self.position = init.normal(_STORED**2, c.width, scale=c.width**-0.5)
        self.first_norm = LayerNorm(c.width, c.norm_eps, init=init)
        self.blocks = nnx.data(tuple(QwenVitBlock(c, init=init) for _ in range(c.layers)))
        self.resampler = Resampler(c, width, init=init)
        self.last_norm = LayerNorm(width, c.norm_eps, init=init)
        self.last = init.normal(width, width, scale=width**-0.5)  # [in, out]

    def __call__(self, pixels: Float[Array, "I 3 h w"]) -> Float[Array, "I v D"]:
        """Tokens of every image, of the decoder's width."""
        c = self.config
        patches = rearrange(pixels, "i c (y a) (x b) -> i (y x) c a b", a=c.patch_size, b=c.patch_size)
        x = jnp.einsum("ivcab,dcab->ivd", patches, self.patch[...])
        x = self.first_norm(x + enlarged(self.position[...], c.grid))
        for block in self.blocks:
            x = block(x)
        return jnp.einsum("ivd,de->ive", self.last_norm(self.resampler(x)), self.last[...])


def enlarged(table: Float[Array, "V D"], side: int) -> Float[Array, "V2 D"]:
    """A square of vectors at another size, bicubic in float32; the same where the size is."""
    stored = round(table.shape[0] ** 0.5)
    if stored == side:
        return table
    weights = _bicubic(stored, side)
    square = table.astype(jnp.float32).reshape(stored, stored, -1)
    made = jnp.einsum("ya,xb,abd->yxd", weights, weights, square, precision="highest")
    return made.reshape(side**2, -1).astype(table.dtype)


def _bicubic(stored: int, side: int) -> Float[np.ndarray, "side stored"]:
    """Weights of Keys' cubic with a = -0.75, sampled at the middles, the outermost entries repeated."""
    a, weights = -0.75, np.zeros((side, stored))
    for out in range(side):
        middle = (out + 0.5) * stored / side - 0.5
        first = int(np.floor(middle))
        for at in range(first - 1, first + 3):
            d = abs(middle - at)
            weight = (a + 2) * d**3 - (a + 3) * d**2 + 1 if d <= 1 else a * (d**3 - 5 * d**2 + 8 * d - 4)
            weights[out, min(max(at, 0), stored - 1)] += weight
    return weights.astype(np.float32)
