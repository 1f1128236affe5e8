"""EVE's patch layer (Diao et al. 2024, Sec. 3.1): patches, attention within each window, a class token per image.

Axes: W windows of all images · P patches of a window · I images · N heads · H head dim · D width. Two details of the
authors' code are kept: logits are scaled by the full width, not by the head dim; the class token attends to the windows
after their own attention.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from vlkv.decoder.layers import Initializer, JoinHeads, LayerNorm, SplitHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvePatchesConfig:
    """Settings of the patch layer."""

    width: int
    longest: int  # pixels of the longer side of an image
    heads: int = 8
    patch_size: int = 14
    window: int = 2  # patches per side that become one token
    coarse: int = 24  # the shorter side is a multiple of longest / coarse
    norm_eps: float = 1e-5

    @property
    def window_size(self) -> int:
        """Pixels per side of a window, which becomes one token."""
        return self.patch_size * self.window

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels that an image is resized to."""
        # Rounding is done at the size of EVE's teacher model (336 pixels, steps of 14), as in the authors' code.
        steps = math.ceil(336 * min(width, height) / max(width, height) / 14)
        short = steps * (self.longest // self.coarse)
        return (self.longest, short) if width > height else (short, self.longest)

    def tokens(self, width: int, height: int) -> int:
        """Number of vision tokens of an image whose size after resizing (`target`) is `width` x `height` pixels."""
        return 1 + height // self.window_size * (width // self.window_size + 1)

    @property
    def blocks(self) -> int:
        """Number of attention blocks within windows."""
        return 1

    def patches(self, shape: tuple[int, ...]) -> int:
        """The number of patches that attend to one another. `shape` is that of the pixels, [W, 3, h, w]."""
        return self.window**2


class CrossAttention(nnx.Module):
    """Cross-attention with a residual: each query attends to its own keys, and the result is added to the query."""

    def __init__(self, c: EvePatchesConfig, *, init: Initializer) -> None:
        head_dim = c.width // c.heads
        self.query_norm = LayerNorm(c.width, c.norm_eps, init=init)
        self.query = SplitHeads(c.width, c.heads, head_dim, bias=False, init=init)
        self.key_norm = LayerNorm(c.width, c.norm_eps, init=init)
        self.key = SplitHeads(c.width, c.heads, head_dim, bias=False, init=init)
        self.value = SplitHeads(c.width, c.heads, head_dim, bias=False, init=init)
        self.out = JoinHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.scale = c.width**-0.5

    def windows(self, queries: Float[Array, "W D"], x: Float[Array, "W P D"]) -> Float[Array, "W D"]:
        """Each query attends to the patches of its window. Returns the queries plus what they received."""
        q, h = self.query(self.query_norm(queries)), self.key_norm(x)
        logits = jnp.einsum("wnh,wpnh->wnp", q, self.key(h), preferred_element_type=jnp.float32) * self.scale
        weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
        return queries + self.out(jnp.einsum("wnp,wpnh->wnh", weights, self.value(h)))

    def images(
        self, query: Float[Array, " D"], x: Float[Array, "W D"], member: Bool[Array, "I W"]
    ) -> tuple[Float[Array, "I D"], Float[Array, "I N W"]]:
        """The query attends to the windows of each image (`member`). Returns its output and the attention weights."""
        q, h = self.query(self.query_norm(query)), self.key_norm(x)
        logits = jnp.einsum("nh,wnh->nw", q, self.key(h), preferred_element_type=jnp.float32) * self.scale
        # Padding images have no windows; their output is not used.
        logits = jnp.where(member[:, None], logits, jnp.finfo(jnp.float32).min)  # [I, N, W]
        weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
        return query + self.out(jnp.einsum("inw,wnh->inh", weights, self.value(h))), weights


class EvePatches(nnx.Module):
    """Embeds windows of pixels, and makes the embeddings of the end-of-line token and the class tokens."""

    def __init__(self, c: EvePatchesConfig, *, init: Initializer) -> None:
        self.config = c
        self.patch = init.normal(c.width, 3, c.patch_size, c.patch_size, scale=(3 * c.patch_size**2) ** -0.5)
        self.class_token = init.normal(c.width, scale=c.width**-0.5)
        self.split_token = init.normal(c.width, scale=c.width**-0.5)
        self.within = CrossAttention(c, init=init)
        self.whole = CrossAttention(c, init=init)

    def __call__(
        self, pixels: Float[Array, "W 3 h w"], member: Bool[Array, "I W"]
    ) -> tuple[Float[Array, "V D"], Float[Array, "N V"]]:
        """Embeddings of all windows, of the end-of-line token and of each image's class token: V = W + 1 + I.

        Also returns the attention that each window receives from its image's class token; zeros for other tokens.
        """
        size = self.config.patch_size
        patches = rearrange(pixels, "w c (y a) (x b) -> w (y x) c a b", a=size, b=size)
        x = jnp.einsum("wpcab,dcab->wpd", patches, self.patch[...])
        windows = self.within.windows(jnp.mean(x, axis=1), x)
        classes, weights = self.whole.images(self.class_token[...], windows, member)
        attention = jnp.sum(jnp.where(member[:, None], weights, 0.0), axis=0, dtype=jnp.float32)
        embeddings = jnp.concatenate([windows, self.split_token[...][None], classes])
        return embeddings, jnp.pad(attention, [(0, 0), (0, 1 + len(classes))])
