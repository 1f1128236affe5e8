"""Gemma 3 with images (4B, 12B, 27B): a SigLIP tower, average pooling to 256 tokens, and the decoder of Gemma 3.

An image is one square, and with pan and scan also crops of a long image, one beside the other. The image and each of
its crops are separate images in `Inputs.grid`, because the tower sees each of them alone, and because tokens attend to
each other in both directions only within one square. The tokens of the squares are the vision tokens. The marks
`<start_of_image>` and `<end_of_image>`, the line breaks around them and the sentences before the crops are text. Our
processor adds `pixel_tiles`, from which `Inputs.tiles` follows: the image is the overview of its crops. Images are
resized by PIL.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from einops import reduce
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.buckets import Buckets
from vlkv.config import ModelConfig, Raw, filled, positive, require, token_id
from vlkv.decoder.layers import Initializer, RMSNorm
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import read_decoder
from vlkv.families.family import Family, VisionLanguageModel
from vlkv.families.names import stored_names
from vlkv.inputs import Inputs
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens, cells, longest_run, tile_numbers
from vlkv.processing.host import SquareConfig
from vlkv.processing.pictures import Pictures, Read, to_square
from vlkv.processing.pixels import KINDS, Layout, PixelSettings, find_settings
from vlkv.processing.templates import stored
from vlkv.towers.vit import NormedVit, SiglipConfig

START, TOKEN, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
# As SigLIP's processor, but `resample` 2 is PIL's bilinear filter.
_DEFAULTS = KINDS["SiglipImageProcessor"] | dict(resample=2, default_to_square=True)
_KIND = "Gemma3ImageProcessor"
# Defaults of transformers' processor; files of checkpoints have null.
_CROPS = dict(
    do_pan_and_scan=False, pan_and_scan_min_crop_size=256, pan_and_scan_max_num_crops=4,
    pan_and_scan_min_ratio_to_activate=1.2,
)  # fmt: skip


class Gemma3Config(SquareConfig):
    """An image of `side` x `side` tokens, and possibly crops of it; they attend to each other in both directions."""

    prompt_format = stored("gemma3")

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        vision, text = SiglipConfig.from_hf(raw.get("vision_config") or {}, -1), raw.get("text_config") or {}
        count = positive("mm_tokens_per_image", raw.get("mm_tokens_per_image", 256))
        side = math.isqrt(count)
        if side**2 != count or vision.grid % side:
            raise InputError(f"config.json: mm_tokens_per_image={count} must be a square whose side divides the "
                             f"{vision.grid} patches per side")  # fmt: skip
        if isinstance(text, dict):  # missing fields have the family's defaults
            require("text_config.model_type", text.get("model_type", "gemma3_text"), "gemma3_text")
            text = {"model_type": "gemma3_text", **text}
        decoder = read_decoder({"tie_word_embeddings": True, **raw, "text_config": text})
        return {
            "decoder": dataclasses.replace(decoder, image_block=count),  # attention in both directions
            "vision": vision,
            "image_token": token_id(raw, "image_token_id", "image_token_index", default=262144),
            "wiring": side,  # vision tokens per side of a square
        }

    @property
    @override
    def side(self) -> int:
        return self.wiring

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        self.check_layout(layout, "pan_and_scan")
        settings = find_settings(folder, {_KIND: _DEFAULTS}, _KIND)
        # Null means the default here, but not for the other settings, so only these fields are filled.
        raw = filled({field: settings.fields.get(field) for field in _CROPS}, _CROPS)
        for field, kinds in (("pan_and_scan_min_crop_size", int), ("pan_and_scan_max_num_crops", int),
                             ("pan_and_scan_min_ratio_to_activate", int | float)):  # fmt: skip
            if not isinstance(raw[field], kinds) or isinstance(raw[field], bool) or not 1 <= raw[field] < math.inf:
                raise settings.error(f"{field}={raw[field]!r} must be a number of at least 1")
        if not isinstance(raw["do_pan_and_scan"], bool):
            raise settings.error(f"do_pan_and_scan={raw['do_pan_and_scan']!r} must be true or false")
        return CropsPictures(
            settings=settings.pixels(),
            side=self.vision.image_size, tokens=self.per_picture,
            crops=layout == "pan_and_scan" or raw["do_pan_and_scan"], least=raw["pan_and_scan_min_crop_size"],
            most=raw["pan_and_scan_max_num_crops"], ratio=raw["pan_and_scan_min_ratio_to_activate"],
        )  # fmt: skip

    @override
    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `SquareConfig.arrange`. `batch` may also have `pixel_tiles` [I, 2].

        They contain, for an image before its crops, the lines and columns of the crops; otherwise zeros.
        """
        arranged = super().arrange(batch, tokens, valid, buckets)
        if longest_run(arranged.vision_index) > self.per_picture:
            raise InputError("two images of a prompt have no text between them, so their tokens would attend to each "
                             f"other: write each as {START}, image tokens, {END}")  # fmt: skip
        if batch.get("pixel_tiles") is None:
            return arranged
        crops = np.asarray(batch["pixel_tiles"])
        shown = np.full((len(crops), self.per_picture), -1)
        for image in np.flatnonzero(crops.prod(axis=1)):
            shown[image] = image + 1 + cells(self.side, *crops[image]).ravel()
        tile = np.repeat(np.arange(len(crops)), self.per_picture)
        return dataclasses.replace(arranged, tiles=tile_numbers(arranged.vision_index, tile, shown.ravel()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CropsPictures(Pictures):
    """Converts an image to one square, or with pan and scan to several."""

    spelled: ClassVar[Mapping[str, str]] = {"image": START}

    settings: PixelSettings
    side: int  # pixels per side for the tower
    tokens: int  # vision tokens of a square
    crops: bool  # pan and scan
    least: int  # pixels of the shorter side of a crop
    most: int  # crops of an image
    ratio: float  # of the longer to the shorter side, from which an image is cropped

    @override
    def image(self, image: PIL.Image.Image, images: int) -> Read:
        lines, columns = self.cuts(*image.size) if self.crops else (0, 0)
        parts = _cut(image, lines, columns)
        text = marked = f"\n\n{START}{TOKEN * self.tokens}{END}\n\n"
        if parts:
            text = (f"Here is the original image {marked} and here are some crops to help you see better "
                    + " ".join([marked] * len(parts)))  # fmt: skip
        pixels = np.stack([to_square(part, self.settings, self.side) for part in (image, *parts)])
        arrays: dict[str, Any] = {"pixel_values": pixels}
        if self.crops:
            arrays["pixel_tiles"] = np.array([(lines, columns), *[(0, 0)] * len(parts)])
        return Read(arrays=arrays, tokens=self.tokens * len(pixels), text=text)

    def cuts(self, width: int, height: int) -> tuple[int, int]:
        """Lines and columns of the crops of an image of this size in pixels; (0, 0): none."""
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter < self.ratio:
            return 0, 0
        count = min(longer // self.least, math.floor(longer / shorter + 0.5))
        count = min(max(2, count), self.most)
        if min(math.ceil(longer / count), shorter) < self.least:
            return 0, 0
        return (1, count) if width >= height else (count, 1)


def _cut(image: PIL.Image.Image, lines: int, columns: int) -> list[PIL.Image.Image]:
    """The image in lines x columns parts; the last ones are smaller if the size is not a multiple."""
    if not lines:
        return []
    width, height = math.ceil(image.width / columns), math.ceil(image.height / lines)
    corners = [(x * width, y * height) for y in range(lines) for x in range(columns)]
    return [image.crop((x, y, min(x + width, image.width), min(y + height, image.height))) for x, y in corners]


class Gemma3Projector(nnx.Module):
    """RMSNorm with 1 + weight, and a product with a matrix that checkpoints have in the order [in, out]."""

    def __init__(self, width_in: int, width_out: int, eps: float, *, init: Initializer) -> None:
        self.norm = RMSNorm(width_in, eps, offset=1.0, init=init)
        self.matrix = init.normal(width_in, width_out, scale=width_in**-0.5)

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch D"]:
        """Maps the last axis."""
        return self.norm(x) @ self.matrix[...]


class Gemma3(VisionLanguageModel):
    """Each vision token is the mean of a square window of patches, and so is its attention."""

    tower = NormedVit

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return Gemma3Projector(config.vision.width, config.decoder.width, config.vision.norm_eps, init=init)

    @override
    def project(self, features: Float[Array, "I V d"], inputs: Inputs) -> Float[Array, "R D"]:
        return self.projector(self.pool(features, inputs))

    @override
    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        side = self.config.wiring
        window = self.config.vision.grid // side
        return reduce(attention, "i (y a x b) c -> (i y x) c", "mean", y=side, a=window, x=side, b=window)


FAMILIES = {"gemma3": Family(config=Gemma3Config, model=Gemma3, names=stored_names("gemma3"))}
