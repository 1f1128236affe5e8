"""Gemma 4 with images (E2B, E4B, 26B-A4B, 31B): a tower at native resolution, and the decoder of Gemma 4.

An image keeps its shape as well as possible: its sides are multiples of the pixels of a token, rounded down, and it has
at most as many tokens as the processor's `max_soft_tokens`. All its tokens, <|image|>, are vision tokens; the marks
around it (<|image>, <image|>) are text. Images are resized by PIL. Videos and audio are not supported.

In the larger models the tokens of an image attend to each other in both directions, in layers with a window.

Axes: B batch · T tokens · F images of the batch · n patches of an image with padding · C values of a patch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from einops import rearrange
from typing_extensions import override

from vlkv.buckets import Buckets
from vlkv.config import Raw, filled, number, positive, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import read_decoder
from vlkv.families.family import Family
from vlkv.families.gemma4.model import Gemma4, Gemma4VisionConfig
from vlkv.families.names import stored_names
from vlkv.files import class_defaults, read_json
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens, arrange_entries, entries, longest_run, zeros
from vlkv.processing.host import HostConfig
from vlkv.processing.images import check_area
from vlkv.processing.native import Picture, pack
from vlkv.processing.pictures import Pictures, Read
from vlkv.processing.pixels import Kinds, Layout, PixelSettings, find_settings, to_pixels
from vlkv.processing.templates import stored
from vlkv.towers.native import read_sizes

_KIND = "Gemma4ImageProcessor"
_KINDS: Kinds = {_KIND: dict(do_normalize=False, image_mean=0.0, image_std=1.0)}
_FIELDS = dict(image_processor_type=_KIND, patch_size=16, pooling_kernel_size=3, max_soft_tokens=280)
_MOST = (70, 140, 280, 560, 1120)  # values of `max_soft_tokens` that the processor accepts
_MARKS = dict(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
_TOWER = class_defaults("gemma4")["gemma4_vision"]
_SIZES = {"width": "hidden_size", "mlp_width": "intermediate_size", "layers": "num_hidden_layers",
          "heads": "num_attention_heads", "patch_size": "patch_size", "merge": "pooling_kernel_size",
          "table": "position_embedding_size"}  # fmt: skip
_REFUSED = {
    "audio": ("input_features", "audio_token_id", 258881),
    "video": ("pixel_values_videos", "video_token_id", 258884),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Wiring:
    """Settings that only this family has; `Gemma4Config.wiring`."""

    tokens: int  # the most vision tokens of an image
    refused: tuple[tuple[str, str, int], ...]  # unsupported kinds of inputs: name, its array in a batch, its token


class Gemma4Config(HostConfig):
    """A tower at native resolution, and a decoder whose sliding layers may see an image in both directions."""

    whole_batch: ClassVar = {"pixels": ("images",), "place": ("images",)}
    prompt_format = stored("gemma4")

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        text, tokens = raw.get("text_config") or {}, raw.get("vision_soft_tokens_per_image")
        most = positive("vision_soft_tokens_per_image", 280 if tokens is None else tokens)
        if isinstance(text, dict):  # missing fields have the family's defaults
            require("text_config.model_type", text.get("model_type", "gemma4_text"), "gemma4_text")
            text = {"model_type": "gemma4_text", **text}
        decoder = read_decoder({"tie_word_embeddings": True, **raw, "text_config": text})
        bidirectional = isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
        refused = ((kind, field, token_id(raw, name, default=token)) for kind, (field, name, token) in _REFUSED.items())
        return {
            "decoder": dataclasses.replace(
                decoder, image_block=most if bidirectional else 0, image_block_slides=bidirectional
            ),
            "vision": _read_tower(raw.get("vision_config") or {}),
            "image_token": token_id(raw, "image_token_id", default=258880),
            "wiring": Gemma4Wiring(tokens=most, refused=tuple(refused)),
        }

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        self.check_layout(layout)
        settings, c = find_settings(folder, _KINDS, _KIND, _FIELDS), self.vision
        s = {**_FIELDS, **settings.fields}
        for field, wanted in (("patch_size", c.patch_size), ("pooling_kernel_size", c.merge)):
            if s[field] != wanted:
                raise settings.mismatch(f"{field}={s[field]!r}", f"has {wanted}")
        if s.get("do_resize", True) is not True:
            raise settings.error(f"do_resize={s['do_resize']!r} is not supported (only true)")
        most, block = s["max_soft_tokens"], self.decoder.image_block
        if most not in _MOST:
            raise settings.error(f"max_soft_tokens={most!r} must be one of {', '.join(map(str, _MOST))}")
        if block and most > block:
            problem = f"max_soft_tokens={most} exceeds vision_soft_tokens_per_image={block} of config.json"
            raise settings.error(f"{problem}: change one of the two")
        marks = filled(read_json(folder / "tokenizer_config.json") or {}, _MARKS)
        return PatchPictures(
            settings=settings.pixels(do_resize=False, do_center_crop=False),
            side=c.patch_size, merge=c.merge, most=most, begin=str(marks["boi_token"]),
            token=str(marks["image_token"]), end=str(marks["eoi_token"]),
        )  # fmt: skip

    @override
    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `ModelConfig.arrange`. `batch` may have the arrays of images.

        They are `pixel_values` [I, n, C] and `image_position_ids` [I, n, 2], the column and line of each patch, -1 for
        padding. In the result, `layout["place"]` [F, n, 2] is the line and column of each patch, -1 for padding; the
        patches of a token are neighbours.
        """
        for kind, field, token in self.wiring.refused:
            if batch.get(field) is not None or (valid & (tokens == token)).any():
                raise InputError(f"{self.family}: {kind} is not supported, only text and images; leave {field} and "
                                 f"the tokens {token} out")  # fmt: skip
        pictures = self._pictures(batch)
        pixels, place, slots = pack(pictures, self.vision, buckets) if pictures else (None, None, [])
        rows = [entries(slot[0], 0) for slot in slots]
        fields, _ = arrange_entries(tokens, valid, {self.image_token: rows}, buckets)
        block = self.decoder.image_block
        if block and (run := longest_run(fields["vision_index"])) > block:
            raise InputError(f"{run} image tokens without text between them, but an image has at most {block}: write "
                             "each image as <|image>, image tokens, <image|>")  # fmt: skip
        return Arranged(**fields, pixels=pixels, layout={} if place is None else {"place": place})

    def _pictures(self, batch: Batch) -> list[Picture]:
        c, pixels, place = self.vision, batch.get("pixel_values"), batch.get("image_position_ids")
        if pixels is None:
            return []
        if place is None:
            raise InputError("inputs have pixel_values but no image_position_ids")
        pixels, place = np.asarray(pixels, np.float32), np.asarray(place)
        if pixels.ndim != 3 or pixels.shape[2:] != c.patch_shape or place.shape != (*pixels.shape[:2], 2):
            raise InputError(f"pixel_values have shape {pixels.shape} and image_position_ids {place.shape}, expected "
                             f"[images, patches, {c.patch_shape[0]}] and [images, patches, 2]")  # fmt: skip
        pictures = []
        for values, positions in zip(pixels, place, strict=True):
            columns, lines = (int(n) + 1 for n in positions.max(axis=0))
            count, expected = lines * columns, np.indices((lines, columns)).reshape(2, -1)[::-1].T
            if not count or lines % c.merge or columns % c.merge or max(lines, columns) > c.table:
                raise InputError(f"an image has {lines} x {columns} patches: lines and columns must be multiples of "
                                 f"{c.merge}, up to {c.table}")  # fmt: skip
            if len(positions) < count or (positions[:count] != expected).any() or (positions[count:] != -1).any():
                raise InputError("image_position_ids must have the patches of an image line by line, then -1")
            lines, columns = lines // c.merge, columns // c.merge
            patches = rearrange(values[:count], "(y a x b) c -> 1 (y x a b) c", y=lines, a=c.merge, b=c.merge)
            pictures.append(Picture(patches, lines, columns, interval=1.0))
        return pictures

    @override
    def sample(self, pictures: int, max_tokens: int) -> tuple[dict[str, Any], int]:
        """Like `ModelConfig.sample`: images that are nearly square, each with as many tokens as a processor makes."""
        c, most = self.vision, max(1, min(max_tokens // pictures, self.wiring.tokens))
        lines = math.isqrt(most)
        positions = np.indices((lines * c.merge, most // lines * c.merge)).reshape(2, -1)[::-1].T
        place = np.broadcast_to(positions, (pictures, *positions.shape))
        arrays = {"pixel_values": zeros(*place.shape[:2], *c.patch_shape), "image_position_ids": place}
        return arrays, pictures * len(positions) // c.merge**2

    @override
    def max_pictures(self, max_tokens: int) -> int:
        """The smallest number of images that can have `max_tokens` vision tokens together."""
        return max(1, math.ceil(max_tokens / self.wiring.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchPictures(Pictures):
    """Converts images to patches."""

    settings: PixelSettings  # for the resized image
    side: int  # pixels per side of a patch
    merge: int  # patches per side of a token
    most: int  # tokens of an image
    begin: str  # before the tokens of an image
    token: str  # one of them
    end: str  # after them

    @override
    def image(self, image: PIL.Image.Image, images: int) -> Read:
        height, width = self.scaled(image.height, image.width)
        check_area(width, height, f"the {image.width} x {image.height} image, after resizing")
        pixels = to_pixels(image.resize((width, height), resample=self.settings.resample), self.settings)
        patches = rearrange(pixels, "c (y p) (x q) -> (y x) (p q c)", p=self.side, q=self.side)
        positions = np.indices((height // self.side, width // self.side)).reshape(2, -1)[::-1].T  # (column, line)
        count, missing = len(patches) // self.merge**2, self.most * self.merge**2 - len(patches)
        arrays = {
            "pixel_values": np.pad(patches, [(0, missing), (0, 0)])[None],
            "image_position_ids": np.pad(positions, [(0, missing), (0, 0)], constant_values=-1),
        }
        return Read(arrays=arrays, tokens=count, text=self.begin + self.token * count + self.end)

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels after resizing: multiples of a token, with at most `most` tokens."""
        token = self.side * self.merge
        factor = math.sqrt(self.most * token**2 / (height * width))
        lines, columns = (math.floor(factor * side / token) for side in (height, width))
        if not lines:
            lines, columns = 1, min(width // height, self.most)
        elif not columns:
            lines, columns = min(height // width, self.most), 1
        return lines * token, columns * token


def _read_tower(raw: object) -> Gemma4VisionConfig:
    if not isinstance(raw, Mapping):
        raise InputError(f"config.json: vision_config={raw!r} must be an object")
    c, where = filled(raw, _TOWER), "vision_config."
    sizes = read_sizes(c, _SIZES, theta=100.0)
    only = {"hidden_activation": _TOWER["hidden_activation"], "num_key_value_heads": sizes["heads"],
            "head_dim": sizes["width"] // sizes["heads"], "attention_bias": False,
            "model_type": "gemma4_vision"}  # fmt: skip
    require_all(c, only, where)
    return Gemma4VisionConfig(
        **sizes, activation=_TOWER["hidden_activation"], norm="rms_norm", gated=True,
        norm_eps=number(f"{where}rms_norm_eps", c["rms_norm_eps"]),
        clipped=bool(c.get("use_clipped_linears")), standardised=bool(c.get("standardize")),
    )  # fmt: skip


FAMILIES = {"gemma4": Family(config=Gemma4Config, model=Gemma4, names=stored_names("gemma4"))}
