"""The InternViT tower (Chen et al. 2024, InternVL), 300M and 6B.

Axes: I tiles · V patches and the class token · N heads · D width. Quirks kept: the class token takes part but is
dropped, every branch has a scale per channel, queries and keys of the 6B are normalised over all heads at once, and
no norm follows the last block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import InternVitConfig
from vlkv.layers import Embedding, Initializer, JoinHeads, LayerNorm, Linear, RMSNorm, SplitHeads
from vlkv.parallel import prefill_attention

_NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


class InternVitBlock(nnx.Module):
    """Pre-norm attention over all patches, then an MLP; each branch scaled channel by channel."""

    def __init__(self, c: InternVitConfig, *, init: Initializer) -> None:
        head_dim, norm = c.width // c.heads, _NORMS[c.norm]
        self.attention_norm = norm(c.width, c.norm_eps, init=init)
        self.query = SplitHeads(c.width, c.heads, head_dim, bias=c.qkv_bias, init=init)
        self.key = SplitHeads(c.width, c.heads, head_dim, bias=c.qkv_bias, init=init)
        self.value = SplitHeads(c.width, c.heads, head_dim, bias=c.qkv_bias, init=init)
        eps = c.qk_norm_eps
        self.query_norm = None if eps is None else RMSNorm(c.width, eps, init=init)
        self.key_norm = None if eps is None else RMSNorm(c.width, eps, init=init)
        self.out = JoinHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.attention_scale = init.constant(0.1, c.width)
        self.mlp_norm = norm(c.width, c.norm_eps, init=init)
        self.up = Linear(c.width, c.mlp_width, bias=True, init=init)
        self.down = Linear(c.mlp_width, c.width, bias=True, init=init)
        self.mlp_scale = init.constant(0.1, c.width)

    def __call__(self, x: Float[Array, "I V D"]) -> Float[Array, "I V D"]:
        """One block."""
        h = self.attention_norm(x)
        q, k = _whole(self.query_norm, self.query(h)), _whole(self.key_norm, self.key(h))
        x = x + self.attention_scale[...] * self.out(prefill_attention(q, k, self.value(h), causal=False))
        h = jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=False)
        return x + self.mlp_scale[...] * self.down(h)

    def class_attention(self, x: Float[Array, "I V D"]) -> Float[Array, "I N V"]:
        """The class token's row of the attention of this block: what it gives to itself and to every patch."""
        h = self.attention_norm(x)
        q, k = _whole(self.query_norm, self.query(h[:, :1])), _whole(self.key_norm, self.key(h))
        logits = jnp.einsum("itnh,ivnh->inv", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        return jax.nn.softmax(logits, axis=-1)


class InternVitTower(nnx.Module):
    """Patches, blocks up to the feature layer, class token dropped."""

    def __init__(self, c: InternVitConfig, *, init: Initializer) -> None:
        self.config = c
        self.patch = init.normal(c.width, 3, c.patch_size, c.patch_size, scale=(3 * c.patch_size**2) ** -0.5)
        self.patch_bias = init.constant(0.0, c.width)
        self.class_token = init.normal(c.width, scale=c.width**-0.5)
        self.position = Embedding(c.grid**2 + 1, c.width, init=init)
        self.blocks = nnx.data(tuple(InternVitBlock(c, init=init) for _ in range(c.blocks)))

    def __call__(self, pixels: Float[Array, "I 3 h w"]) -> Float[Array, "I V D"]:
        """Features of every patch of every tile, in raster order."""
        return self.watch(pixels, ())[0]

    def watch(
        self, pixels: Float[Array, "I 3 h w"], blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "I V D"], list[Float[Array, "I N V"]]]:
        """The same, with the class token's attention in some of the blocks that run (negative: from the last)."""
        c, tiles = self.config, pixels.shape[0]
        patches = rearrange(pixels, "i c (y a) (x b) -> i (y x) c a b", a=c.patch_size, b=c.patch_size)
        x = jnp.einsum("ivcab,dcab->ivd", patches, self.patch[...]) + self.patch_bias[...]
        first = jnp.broadcast_to(self.class_token[...], (tiles, 1, c.width))
        x = jnp.concatenate([first, x], axis=1) + self.position.weight[...]
        inputs = []
        for block in self.blocks:
            inputs.append(x)
            x = block(x)
        rows = [self.blocks[i].class_attention(inputs[i])[..., 1:] for i in blocks]
        return x[:, 1:], rows


def _whole(norm: RMSNorm | None, x: Float[Array, "I V N H"]) -> Float[Array, "I V N H"]:
    """Normalised over all heads together."""
    return x if norm is None else norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
