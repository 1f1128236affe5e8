"""The SigLIP vision tower (Zhai et al. 2023), as LLaVA-OneVision uses it.

Axes: I images · V patches · D width. Unlike CLIP's there is no class token and no norm before the first block, the
patch convolution has a bias and the GELU is the tanh approximation. Features are taken before the tower's own norm.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import SiglipConfig
from vlkv.layers import Embedding, Initializer, JoinHeads, LayerNorm, Linear, SplitHeads
from vlkv.parallel import prefill_attention


class SiglipBlock(nnx.Module):
    """Pre-norm attention over all patches, then an MLP."""

    def __init__(self, c: SiglipConfig, *, init: Initializer) -> None:
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
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=True))


class SiglipTower(nnx.Module):
    """Patches, then blocks up to the feature layer."""

    def __init__(self, c: SiglipConfig, *, init: Initializer) -> None:
        self.config = c
        self.patch = init.normal(c.width, 3, c.patch_size, c.patch_size, scale=(3 * c.patch_size**2) ** -0.5)
        self.patch_bias = init.constant(0.0, c.width)
        self.position = Embedding(c.grid**2, c.width, init=init)
        self.blocks = nnx.data(tuple(SiglipBlock(c, init=init) for _ in range(c.blocks)))

    def __call__(self, pixels: Float[Array, "I 3 h w"]) -> Float[Array, "I V D"]:
        """Features of every image, in raster order."""
        c = self.config
        used = c.grid * c.patch_size  # the convolution's stride leaves a margin out
        patches = rearrange(
            pixels[..., :used, :used], "i c (y a) (x b) -> i (y x) c a b", a=c.patch_size, b=c.patch_size
        )
        x = jnp.einsum("ivcab,dcab->ivd", patches, self.patch[...]) + self.patch_bias[...]
        x = x + self.position.weight[...]
        for block in self.blocks:
            x = block(x)
        return x
