"""The vision towers of Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025).

Axes: F frames · n places for patches · C values of a patch · D width · H head dim.
Quirks kept: attention never leaves a frame, in videos neither; line and column turn half of the channel pairs each, at
the same frequencies; in Qwen2.5-VL most blocks attend within windows, which the layout has laid side by side.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from vlkv.config import QwenVisionConfig
from vlkv.layers import Initializer, JoinHeads, LayerNorm, Linear, RMSNorm, SplitHeads, quick_gelu
from vlkv.parallel import prefill_attention
from vlkv.rope import cosines_and_sines, turn

_EPS = 1e-6  # of every norm; no config says it


def norm(c: QwenVisionConfig, *, init: Initializer) -> RMSNorm | LayerNorm:
    """The kind of norm that the tower and its merger use."""
    return (RMSNorm if c.gated else LayerNorm)(c.width, _EPS, init=init)


class QwenBlock(nnx.Module):
    """Pre-norm attention, then an MLP: gated (SiLU), or plain with quick GELU."""

    def __init__(self, c: QwenVisionConfig, *, init: Initializer) -> None:
        head_dim = c.width // c.heads
        self.attention_norm = norm(c, init=init)
        self.query = SplitHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.key = SplitHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.value = SplitHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.out = JoinHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.mlp_norm = norm(c, init=init)
        self.gate = Linear(c.width, c.mlp_width, bias=True, init=init) if c.gated else None
        self.up = Linear(c.width, c.mlp_width, bias=True, init=init)
        self.down = Linear(c.mlp_width, c.width, bias=True, init=init)

    def __call__(
        self, x: Float[Array, "F n D"], rotation: Float[Array, "F n 1 H"], valid: Bool[Array, "F n"]
    ) -> Float[Array, "F n D"]:
        """One block over frames, or over windows as if they were frames."""
        h = self.attention_norm(x)
        q, k = turn(self.query(h), rotation), turn(self.key(h), rotation)
        x = x + self.out(prefill_attention(q, k, self.value(h), valid=valid, causal=False))
        h = self.mlp_norm(x)
        up = self.up(h)
        return x + self.down(quick_gelu(up) if self.gate is None else jax.nn.silu(self.gate(h)) * up)


class QwenTower(nnx.Module):
    """Patches and blocks; merging them into tokens is the wiring's."""

    def __init__(self, c: QwenVisionConfig, *, init: Initializer) -> None:
        self.config = c
        self.patch = Linear(c.patch_values, c.width, bias=False, init=init)
        self.blocks = nnx.data(tuple(QwenBlock(c, init=init) for _ in range(c.layers)))

    def __call__(self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"]) -> Float[Array, "F n D"]:
        """Features of every patch; `place` is its line and column, -1 for padding."""
        c, n = self.config, pixels.shape[1]
        x, valid = self.patch(pixels), place[..., 0] >= 0
        rotation = cosines_and_sines(_angles(place, c))
        size = n if c.window is None else (c.window * c.merge) ** 2  # patches of a window
        for i, block in enumerate(self.blocks):
            part = n if i in c.full else size
            cut = [rearrange(y, "f (w p) ... -> (f w) p ...", p=part) for y in (x, rotation, valid)]
            x = rearrange(block(*cut), "(f w) p d -> f (w p) d", w=n // part)
        return x


def _angles(place: Int[Array, "F n 2"], c: QwenVisionConfig) -> Float[Array, "F n _"]:
    """Of each channel pair: the first half by line, the second by column."""
    pairs = c.width // c.heads // 4  # that turn by one of the two
    frequency = c.theta ** -(jnp.arange(pairs, dtype=jnp.float32) / pairs)
    return rearrange(place.astype(jnp.float32)[..., None] * frequency, "f n two pairs -> f n (two pairs)")
