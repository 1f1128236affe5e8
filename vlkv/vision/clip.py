"""The CLIP vision tower (Radford et al. 2021), as LLaVA-1.5 uses it.

Axes: I images · V patches (and the class token) · D width. Quirks kept: the patch convolution has no bias, a LayerNorm
stands before the first block, quick GELU, and the features are taken before the tower's own final norm.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import ClipConfig
from vlkv.layers import Embedding, Initializer, JoinHeads, LayerNorm, Linear, SplitHeads, quick_gelu
from vlkv.parallel import prefill_attention


class ClipBlock(nnx.Module):
    """Pre-norm attention over all patches, then an MLP."""

    def __init__(self, c: ClipConfig, *, init: Initializer) -> None:
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
        return x + self.down(quick_gelu(self.up(self.mlp_norm(x))))

    def class_attention(self, x: Float[Array, "I V D"]) -> Float[Array, "I N V"]:
        """The class token's row of the attention of this block: what it gives to itself and to every patch."""
        h = self.attention_norm(x)
        q, k = self.query(h[:, :1]), self.key(h)
        logits = jnp.einsum("itnh,ivnh->inv", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        return jax.nn.softmax(logits, axis=-1)


class ClipTower(nnx.Module):
    """Patches, blocks up to the feature layer, class token dropped unless the config keeps it."""

    def __init__(self, c: ClipConfig, *, init: Initializer) -> None:
        self.config = c
        self.patch = init.normal(c.width, 3, c.patch_size, c.patch_size, scale=(3 * c.patch_size**2) ** -0.5)
        self.class_token = init.normal(c.width, scale=c.width**-0.5)
        self.position = Embedding(c.grid**2 + 1, c.width, init=init)
        self.first_norm = LayerNorm(c.width, c.norm_eps, init=init)
        self.blocks = nnx.data(tuple(ClipBlock(c, init=init) for _ in range(c.blocks)))

    def __call__(self, pixels: Float[Array, "I 3 h w"]) -> Float[Array, "I V D"]:
        """Features of every image, in raster order."""
        return self.watch(pixels, ())[0]

    def watch(
        self, pixels: Float[Array, "I 3 h w"], blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "I V D"], list[Float[Array, "I N V"]]]:
        """The same, with the class token's attention in some of the blocks that run (negative: from the last)."""
        c, images = self.config, pixels.shape[0]
        patches = rearrange(pixels, "i c (y a) (x b) -> i (y x) c a b", a=c.patch_size, b=c.patch_size)
        x = jnp.einsum("ivcab,dcab->ivd", patches, self.patch[...])
        first = jnp.broadcast_to(self.class_token[...], (images, 1, c.width))
        x = self.first_norm(jnp.concatenate([first, x], axis=1) + self.position.weight[...])
        inputs = []
        for block in self.blocks:
            inputs.append(x)
            x = block(x)
        skip = 0 if c.keep_class_token else 1
        rows = [self.blocks[i].class_attention(inputs[i])[..., skip:] for i in blocks]
        return x[:, skip:], rows
