"""PaddleOCR-VL, PaddleOCR-VL-1.5 and 1.6 (Cui et al. 2025): a SigLIP tower at native resolution, an ERNIE-4.5 decoder.

The tower has 2-D RoPE, positions interpolated from a square table, and a norm at the end. Images are resized to whole
tokens, and every token of an image is a vision token. The marks around it (<|IMAGE_START|>, <|IMAGE_END|>) are text. A
side that is shorter than a token is first stretched to one. The processor returns patches line by line, and not token
by token. Videos are not supported, as in transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int
from typing_extensions import override

from vlkv.config import ModelConfig, Raw, filled, number, positive, require, require_all, token_id
from vlkv.decoder.layers import Initializer
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import Kind, read_stop
from vlkv.families.family import Family
from vlkv.families.models import NativeModel
from vlkv.families.names import stored_names
from vlkv.files import class_defaults
from vlkv.processing.native import NativePictures, NativeResolutionConfig
from vlkv.processing.pictures import Pictures, Read, Video
from vlkv.processing.pixels import Kinds, PictureKind
from vlkv.processing.templates import stored
from vlkv.towers.native import PatchMerger, TableConfig, TableTower, check_decoder, read_sizes

_DEFAULTS = class_defaults("paddleocr_vl")
_DECODER = Kind(defaults=_DEFAULTS["paddleocr_vl_text"])  # with `use_bias` the MLP would have biases too
_TOWER, _PROCESSOR = _DEFAULTS["paddleocr_vl_vision"], _DEFAULTS["PaddleOCRVLImageProcessor"]
_SIZES = {"width": "hidden_size", "mlp_width": "intermediate_size", "layers": "num_hidden_layers",
          "heads": "num_attention_heads", "patch_size": "patch_size", "merge": "spatial_merge_size"}  # fmt: skip
_TIE = "tie_word_embeddings"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddleOcrVlPictures(NativePictures):
    """Converts images to patches."""

    @override
    def video(self, video: Video) -> Read:
        return Pictures.video(self, video)  # raises an error; `NativePictures` would convert the video

    @override
    def _scaled(self, height: int, width: int, kind: PictureKind, frames: int) -> tuple[int, int]:
        factor = self.config.patch_size * self.config.merge
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return super()._scaled(height, width, kind, frames)


class PaddleOcrVlConfig(NativeResolutionConfig):
    """A tower at native resolution and a decoder with M-RoPE."""

    prompt_format = stored("paddleocr_vl")  # that of the first published checkpoint
    pictures = PaddleOcrVlPictures
    # The second name is that of the authors' code.
    processors: ClassVar[Kinds] = dict.fromkeys(("PaddleOCRVLImageProcessor", "SiglipImageProcessor"), _PROCESSOR)
    kinds: ClassVar = {"image": "PaddleOCRVLImageProcessor"}

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        nested = raw.get("text_config")  # in transformers 5; the published file is flat
        part, kind = dict(raw if nested is None else nested), "paddleocr_vl_text"
        if nested is not None:
            require("text_config.model_type", part.get("model_type", kind), kind)
        tied = raw.get(_TIE, True) or (nested is not None and part.get(_TIE, True))
        require("use_bias", bool(part.get("use_bias", False)), False)
        decoder = _DECODER.read(part | {_TIE: bool(tied)})
        check_decoder(decoder, decoder.width)
        return {
            "decoder": decoder,
            "vision": _read_tower(raw.get("vision_config") or {}, decoder.width),
            "image_token": token_id(raw, "image_token_id", default=100295),
            "stop": read_stop(raw, 2),
        }


def _read_tower(raw: Raw, out_width: int) -> PaddleOcrVlTowerConfig:
    c, where = filled(raw, _TOWER), "vision_config."
    require_all(c, {"hidden_act": _TOWER["hidden_act"], "num_channels": 3}, where)
    sizes = read_sizes(c, _SIZES)
    if positive(where + "image_size", c["image_size"]) < c["patch_size"]:
        raise InputError(f"config.json: {where}image_size={c['image_size']} is less than patch_size={c['patch_size']}")
    return PaddleOcrVlTowerConfig(
        **sizes, out_width=out_width, frames=1, activation=c["hidden_act"], norm="layer_norm", gated=False,
        norm_eps=number(where + "layer_norm_eps", c["layer_norm_eps"]), table=c["image_size"] // c["patch_size"],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddleOcrVlTowerConfig(TableConfig):
    """A tower whose positions are interpolated as in `torch.nn.functional.interpolate(align_corners=False)`."""

    norm_eps: float = dataclasses.field()

    by_line = True
    aligned = False


class PaddleOcrVlTower(TableTower):
    """Patch embedding, positions, blocks, and the last norm. F frames are images here."""

    def __init__(self, c: PaddleOcrVlTowerConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.norm = c.make_norm(init=init)

    @override
    def with_attention(
        self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"], blocks: tuple[int, ...]
    ) -> tuple[list[Float[Array, "F n D"]], list[Float[Array, "F N n"]]]:
        features, attention = super().with_attention(pixels, place, blocks)
        return [self.norm(x) for x in features], attention


class PaddleOcrVl(NativeModel):
    """The norm of the merger has an epsilon of its own."""

    tower = PaddleOcrVlTower

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> PatchMerger:
        return PatchMerger(dataclasses.replace(config.vision, norm_eps=1e-5), init=init)


FAMILIES = {"paddleocr_vl": Family(config=PaddleOcrVlConfig, model=PaddleOcrVl, names=stored_names("paddleocr_vl"))}
