"""EVE (Diao et al. 2024, version 1): a patch layer (Sec. 3.1) and a Llama decoder, without a vision tower.

All images have the same longer side; the shorter side is rounded up to a step, so the shape is nearly kept. They are
cut into windows. A class token precedes each image, and an end-of-line token follows every line of windows. All of
these are vision tokens. Windows have a line and a column in the grid; class and end-of-line tokens have none (-1),
because they show no part of the image.

The checkpoint only names its patch layer, and the file with the settings of that layer was never published. So they
are written here. The name contains the longer side of an image in pixels. Patches have 14 pixels and windows 2 patches
per side in both models; for HD we conclude this from its 4096 positions, which no other window fits.

Axes: W windows of all images · P patches of a window · I images · N heads · H head dim · D width. Two details of the
authors' code are kept: logits are scaled by the full width, not by the head dim; the class token attends to the windows
after their own attention.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from vlkv.buckets import Buckets, round_up
from vlkv.config import Raw, positive, require
from vlkv.decoder.layers import Initializer, JoinHeads, LayerNorm, SplitHeads
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import KINDS
from vlkv.families.family import Family, VisionLanguageModel
from vlkv.families.llava_form import known_tower
from vlkv.families.names import stored_names
from vlkv.inputs import Inputs
from vlkv.processing.arranging import OTHERS, PICTURE, Arranged, Batch, Mask, Tokens, arrange_entries, entries, padded
from vlkv.processing.host import SquareConfig
from vlkv.processing.pictures import Pictures, Read
from vlkv.processing.pixels import Layout, PixelSettings, RawSettings, to_pixels
from vlkv.processing.templates import stored


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
    blocks: ClassVar[int] = 1  # attention blocks within windows

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


class EveConfig(SquareConfig):
    """Images of any shape, in windows. `read` takes the form of `config.json` that the authors' code reads."""

    prompt_format = stored("vicuna")
    whole_batch: ClassVar = {"pixels": ("vision",), "member": ("images", "vision")}

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        longest = known_tower(raw, _LONGEST)
        require("mm_projector_type", raw.get("mm_projector_type", "linear"), "mlp2x_gelu")
        require("mm_use_im_start_end", bool(raw.get("mm_use_im_start_end", False)), False)
        width = positive("mm_hidden_size", raw.get("mm_hidden_size", 1024))
        vision = EvePatchesConfig(width=width, longest=longest)
        if width % vision.heads:
            raise InputError(f"config.json: mm_hidden_size={width} must be a multiple of {vision.heads}")
        decoder = KINDS["llama"].read(raw)
        # The vocabulary has no image token, so the first id after it is used.
        return {"decoder": decoder, "vision": vision, "image_token": decoder.vocab_size}

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> EvePictures:
        self.check_layout(layout)
        settings = RawSettings({"do_resize": False, "do_center_crop": False}, str(folder)).pixels()
        return EvePictures(vision=self.vision, settings=settings)

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `ModelConfig.arrange`. `batch` has `pixel_values` [I, 4, S, S], whose last channel is the mask."""
        images = batch.get("pixel_values")
        windows = [] if images is None else [_windows(pixels, self.vision) for pixels in np.asarray(images, np.float32)]
        counts = [image.shape[0] * image.shape[1] for image in windows]
        first = np.cumsum([0, *counts])  # first window of each image
        # The tokens of each image: its class token, which is source OTHERS - i of image i, then windows and newlines.
        # Not strict, because `np.split` returns one empty part if there are no images.
        pictures = [
            np.concatenate([[[OTHERS - i, 0, -1, -1]], entries(numbers.reshape(image.shape[:2]), 0, "line")])
            for i, (image, numbers) in enumerate(
                zip(windows, np.split(np.arange(first[-1]), first[1:-1]), strict=False)
            )
        ]
        # Order of the vision embeddings: windows, the end-of-line token, class tokens.
        capacity = round_up(int(first[-1]), buckets.vision)  # windows with padding
        fields, _ = arrange_entries(
            tokens, valid, {self.image_token: pictures}, buckets, newline=capacity, others=capacity + 1
        )
        if windows:
            member = np.zeros((round_up(len(windows), buckets.images), capacity), bool)
            for i in range(len(windows)):
                member[i, first[i] : first[i + 1]] = True
            pixels = np.concatenate([window.reshape(-1, *window.shape[2:]) for window in windows])
            fields |= {"pixels": padded(pixels, capacity), "layout": {"member": member}}
        return Arranged(**fields)

    @override
    def sample(self, pictures: int, max_tokens: int) -> tuple[dict[str, Any], int]:
        c = self.vision
        width, height = c.target(PICTURE[1], PICTURE[0])
        pixels = np.zeros((pictures, 4, c.longest, c.longest), np.float32)
        pixels[:, 3, :height, :width] = 1
        return {"pixel_values": pixels}, pictures * c.tokens(width, height)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvePictures(Pictures):
    """Reads images in the way of the authors' code."""

    vision: EvePatchesConfig
    settings: PixelSettings

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """The image is put into the middle of a square; a fourth channel is 1 inside the image and 0 outside."""
        c = self.vision
        width, height = c.target(image.width, image.height)
        step = c.longest // c.coarse
        left, top = ((c.longest - side) // step // 2 * step for side in (width, height))
        resized = image.resize((width, height), PIL.Image.Resampling.BICUBIC)
        pixels = np.zeros((1, 4, c.longest, c.longest), np.float32)
        pixels[0, :, top : top + height, left : left + width] = np.concatenate(
            [to_pixels(resized, self.settings), np.ones((1, height, width), np.float32)]
        )
        return Read(arrays={"pixel_values": pixels}, tokens=c.tokens(width, height))


def _windows(pixels: Float[np.ndarray, "4 S S"], c: EvePatchesConfig) -> Float[np.ndarray, "lines columns 3 p p"]:
    if pixels.ndim != 3 or len(pixels) != 4:
        raise InputError(f"pixel_values of an image have shape {pixels.shape}, expected [4, S, S]: the last is a mask")
    mask = pixels[3] > 0
    lines, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    size = c.window_size
    if not mask.any() or mask.sum() != len(lines) * len(columns) or len(lines) % size or len(columns) % size:
        raise InputError(f"the mask of pixel_values must be a rectangle of whole windows of {size} x {size} pixels")
    shown = pixels[:3, lines[0] : lines[-1] + 1, columns[0] : columns[-1] + 1]
    return rearrange(shown, "c (y a) (x b) -> y x c a b", a=size, b=size)


_LONGEST = {"eve-patch14-anypixel-672": 672, "eve-patch14-anypixel-1344": 1344}


class Eve(VisionLanguageModel):
    """EVE's patch layer, a projector and a decoder."""

    tower = EvePatches

    @override
    def run_tower(self, inputs: Inputs, pixels: Array, blocks: tuple[int, ...]) -> tuple[Array, list[Array]]:
        # The patch layer has only one block, so every entry of `blocks` means that block.
        features, attention = self.vision(pixels, inputs.layout["member"])
        return features, [attention[None] for _ in blocks]


FAMILIES = {"eve": Family(config=EveConfig, model=Eve, names=stored_names("eve"))}
