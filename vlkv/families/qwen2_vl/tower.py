"""The vision towers of Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025).

Axes: F frames · n places for patches · C values of a patch · D width · H head dim.
Quirks kept: attention never leaves a frame, in videos neither; line and column turn half of the channel pairs each, at
the same frequencies; in Qwen2.5-VL most blocks attend within windows, which the layout has laid side by side.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from vlkv.decoder.layers import Initializer, Linear, Mlp
from vlkv.decoder.rope import cosines_and_sines
from vlkv.towers.vit import BlockConfig, VitBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2VisionConfig(BlockConfig):
    """A tower over patches of `frames` x `patch_size` x `patch_size` pixels, `merge` x `merge` of which make a token.

    Attributes:
        gated: blocks of RMSNorm and a gated SiLU MLP (Qwen2.5-VL), not of LayerNorm and quick GELU (Qwen2-VL).
        window: tokens per side of an attention window; None: every block sees the whole frame.
        full: the blocks that see the whole frame although there are windows.
        tokens_per_second: how far a second moves the temporal position of a video; None: a frame moves it by one.
        whole_seconds: truncate the seconds of a frame before they are multiplied, as transformers 5.2 does; later
            ones truncate the product alone, as here by default. `dataclasses.replace` the processor's `config` to
            choose, or truncate `second_per_grid_ts` before `Inputs.from_hf`.
    """

    out_width: int
    patch_size: int  # pixels
    frames: int  # of a video that one patch spans; an image is repeated
    merge: int
    theta: float
    gated: bool = dataclasses.field()
    window: int | None = None
    full: tuple[int, ...] = ()
    tokens_per_second: float | None = None
    whole_seconds: bool = False

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return 3 * self.frames * self.patch_size**2

    @property
    def norm(self) -> str:  # type: ignore[override]
        """Of the blocks and the merger."""
        return "rms_norm" if self.gated else "layer_norm"

    @property
    def activation(self) -> str:  # type: ignore[override]
        """Of the MLP, or of its gate."""
        return "silu" if self.gated else "quick_gelu"

    def patches(self, shape: tuple[int, ...]) -> int:
        """Patches that attend to one another, of pixels of this shape [F, n, C]."""
        return shape[1]


class Qwen2VlMerger(Mlp):
    """Norm, merge x merge patches side by side, linear, exact (erf) GELU, linear."""

    def __init__(self, c: Qwen2VisionConfig, *, init: Initializer) -> None:
        self.unit = c.merge**2
        self.norm = c.make_norm(init=init)
        super().__init__(c.width * self.unit, c.width * self.unit, c.out_width, init=init)

    def __call__(self, x: Float[Array, "F n i"]) -> Float[Array, "V D"]:
        """Vision embeddings of all frames in one list."""
        return super().__call__(rearrange(self.norm(x), "f (v u) i -> (f v) (u i)", u=self.unit))


class Qwen2VlTower(nnx.Module):
    """Patches and blocks; merging them into tokens is the merger's."""

    def __init__(self, c: Qwen2VisionConfig, *, init: Initializer) -> None:
        self.config = c
        self.patch = Linear(c.patch_values, c.width, bias=False, init=init)
        self.blocks = nnx.data(tuple(VitBlock(c, init=init) for _ in range(c.layers)))

    def watch(
        self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"], blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "F n D"], list[Float[Array, "F N n"]]]:
        """Features of every patch, and the mean attention that each receives in some of the blocks.

        Args:
            pixels: of all frames.
            place: line and column of each patch, -1 for padding.
            blocks: negative: from the last. The mean is over the patches of a frame; in a block with windows, the
                patches of other windows give nothing.
        """
        c, n = self.config, pixels.shape[1]
        x, valid = self.patch(pixels), place[..., 0] >= 0
        rotation = cosines_and_sines(_angles(place, c))
        size = n if c.window is None else (c.window * c.merge) ** 2  # patches of a window
        watched, count = {i % len(self.blocks): i for i in blocks}, jnp.maximum(jnp.sum(valid, axis=1), 1)
        given: dict[int, Array] = {}
        for i, block in enumerate(self.blocks):
            part = n if i in c.full else size
            cut = [rearrange(y, "f (w p) ... -> (f w) p ...", p=part) for y in (x, rotation, valid)]
            if i in watched:
                summed = rearrange(block.received(*cut), "(f w) h p -> f h (w p)", w=n // part)
                given[watched[i]] = summed / count[:, None, None]
            x = rearrange(block(*cut), "(f w) p d -> f (w p) d", w=n // part)
        return x, [given[i] for i in blocks]


def _angles(place: Int[Array, "F n 2"], c: Qwen2VisionConfig) -> Float[Array, "F n _"]:
    """Of each channel pair: the first half by line, the second by column."""
    pairs = c.width // c.heads // 4  # that turn by one of the two
    frequency = c.theta ** -(jnp.arange(pairs, dtype=jnp.float32) / pairs)
    return rearrange(place.astype(jnp.float32)[..., None] * frequency, "f n two pairs -> f n (two pairs)")
