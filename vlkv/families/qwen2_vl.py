"""Qwen2-VL (Wang et al. 2024), Qwen2.5-VL and Qwen3-VL (Bai et al. 2025), and Qwen3.5: native resolution and M-RoPE.

All tokens of a frame, <|image_pad|> or <|video_pad|>, are vision tokens; the marks around them (<|vision_start|>,
<|vision_end|>) are text. Qwen3-VL has a table of positions, DeepStack (some blocks' outputs are merged too and added
after the decoder's first layers), and text with the time before each frame of a video: the mean of its two pictures. A
processor of transformers before 5.10 leaves out the two marks around the whole video. Qwen3.5 has the tower of Qwen3-VL
without DeepStack, and a decoder of which most layers are recurrent; Qwen3.6 and 3.8 have the same form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from vlkv.config import DecoderConfig, Raw, positive, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import KINDS, Kind, read_stop, tied_by_either
from vlkv.families.family import Family
from vlkv.families.models import NativeModel
from vlkv.families.names import stored_names
from vlkv.files import class_defaults
from vlkv.processing.native import NativePictures, NativeResolutionConfig, TimedPictures
from vlkv.processing.pixels import Kinds
from vlkv.processing.templates import stored
from vlkv.towers.native import SIZES, NativeConfig, TableConfig, TableTower, check_decoder, read_sizes, tower_fields

_DEFAULTS = class_defaults("qwen2_vl")
DECODERS = {
    "qwen2_vl": Kind(qkv_bias=True, windows="typed", defaults=_DEFAULTS["qwen2_vl_text"]),
    "qwen3_vl": Kind(names="qwen3", qk_norm=True, interleaved=True, defaults=_DEFAULTS["qwen3_vl_text"]),
    "qwen3_vl_moe": Kind(
        names="qwen3_moe", qk_norm=True, interleaved=True, experts=True, normalised=True,
        defaults=_DEFAULTS["qwen3_vl_moe_text"],
    ),
    **{kind: KINDS[f"{kind}_text"] for kind in ("qwen3_5", "qwen3_5_moe")},
}  # fmt: skip
# The second name is that of the first folders of Qwen2.5-VL.
_IMAGES = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")


class Qwen2VlConfig(NativeResolutionConfig):
    """Qwen2-VL and Qwen2.5-VL, which differ in their towers."""

    prompt_format = stored("qwen2_vl")  # that of the published checkpoints
    pictures = NativePictures
    processors: ClassVar[Kinds] = {name: _DEFAULTS[name] for name in (*_IMAGES, "Qwen2VLVideoProcessor")}
    kinds: ClassVar = {"image": "Qwen2VLImageProcessor", "video": "Qwen2VLVideoProcessor"}

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        family = raw["model_type"]
        nested = raw.get("text_config")
        part = dict(raw if nested is None else nested)  # flat in transformers 4, nested in 5
        if part.get("model_type") != family:
            require("text_config.model_type", part.get("model_type", f"{family}_text"), f"{family}_text")
        part["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings") or part.get("tie_word_embeddings"))
        decoder = DECODERS["qwen2_vl"].read(part)
        vision = _read_tower(family, raw.get("vision_config") or {})
        return {"decoder": decoder, "vision": vision, **_read_tokens(raw, decoder, vision, (151655, 151656, 151645))}


class TimedFrames(TimedPictures):
    """Converts images and videos to patches, and writes the time of each frame of a video."""

    @override
    def frame(self, first: float, last: float, tokens: int) -> str:
        return f"<{(first + last) / 2:.1f} seconds><|vision_start|>{'<|video_pad|>' * tokens}<|vision_end|>"


class Qwen3VlConfig(NativeResolutionConfig):
    """Qwen3-VL with a dense decoder, or one with experts."""

    prompt_format = stored("qwen3_vl")  # that of the published checkpoints
    frames_apart: ClassVar = True
    pictures = TimedFrames
    processors: ClassVar[Kinds] = {name: _DEFAULTS[name] for name in (*_IMAGES, "Qwen3VLVideoProcessor")}
    kinds: ClassVar = {"image": "Qwen2VLImageProcessor", "video": "Qwen3VLVideoProcessor"}
    tower: ClassVar[Mapping[str, Any]] = _DEFAULTS["qwen3_vl"]
    tied_by_either: ClassVar[tuple[str, ...]] = ("qwen3_vl",)  # other families use the outer field alone
    tokens: ClassVar[tuple[int, int, int]] = (151655, 151656, 151645)  # default ids: image, video, end

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        family, part = raw["model_type"], dict(raw.get("text_config") or {})
        require("text_config.model_type", part.get("model_type", f"{family}_text"), f"{family}_text")
        # transformers does not use the default of `tie_word_embeddings` in the class of the decoder with experts.
        tied = tied_by_either(raw) if family in cls.tied_by_either else raw
        decoder = DECODERS[family].read(part | {"tie_word_embeddings": bool(tied.get("tie_word_embeddings"))})
        vision = _read_table_tower(raw.get("vision_config") or {}, cls.tower)
        tokens = _read_tokens(raw, decoder, vision, cls.tokens)
        if len(vision.deep) > decoder.layers:
            raise InputError(f"config.json: vision_config.deepstack_visual_indexes names {len(vision.deep)} blocks, "
                             f"but the decoder has {decoder.layers} layers")  # fmt: skip
        return {"decoder": decoder, "vision": vision, **tokens}


class Qwen35Config(Qwen3VlConfig):
    """Qwen3.5 with a dense decoder, or one with experts."""

    tower: ClassVar = {**_DEFAULTS["qwen3_vl"], "deepstack_visual_indexes": ()}
    tied_by_either: ClassVar = ()
    tokens: ClassVar = (248056, 248057, 248044)

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        require("language_model_only", bool(raw.get("language_model_only")), False)
        deep = (raw.get("vision_config") or {}).get("deepstack_visual_indexes") or []
        require("vision_config.deepstack_visual_indexes", deep, [])
        return super().read(raw)


def _read_tokens(
    raw: Raw, decoder: DecoderConfig, vision: NativeConfig, default: tuple[int, int, int]
) -> dict[str, Any]:
    check_decoder(decoder, vision.out_width)
    return {
        "image_token": token_id(raw, "image_token_id", default=default[0]),
        "video_token": token_id(raw, "video_token_id", default=default[1]),
        "stop": read_stop(raw, default[2]),
    }


def _read_tower(family: str, raw: Raw) -> NativeConfig:
    c, where = tower_fields(raw, _DEFAULTS[family]), "vision_config."
    # transformers 4 wrote "in_chans"
    require_all(c, {"hidden_act": _DEFAULTS[family]["hidden_act"], "in_channels": 3, "in_chans": 3}, where)
    fields = _qwen2_vl(c) if family == "qwen2_vl" else _qwen2_5_vl(c)
    return NativeConfig(activation=c["hidden_act"], **fields)


def _qwen2_vl(c: Raw) -> dict[str, Any]:
    names = {ours: theirs for ours, theirs in SIZES.items() if ours != "mlp_width"}
    # Here `hidden_size` is the decoder's width.
    sizes = read_sizes(c, names | {"width": "embed_dim", "out_width": "hidden_size"})
    return sizes | dict(mlp_width=int(sizes["width"] * c["mlp_ratio"]), gated=False, norm="layer_norm")


def _qwen2_5_vl(c: Raw) -> dict[str, Any]:
    sizes = read_sizes(c, SIZES)
    side = sizes["patch_size"] * sizes["merge"]  # pixels
    if positive("vision_config.window_size", c["window_size"]) % side:
        raise InputError(f"config.json: vision_config.window_size={c['window_size']} must be a multiple of {side}")
    full = tuple(c["fullatt_block_indexes"])
    if not all(isinstance(block, int) and block >= 0 for block in full):
        raise InputError(f"config.json: vision_config.fullatt_block_indexes={full!r} must be indices of blocks")
    return sizes | dict(gated=True, norm="rms_norm", window=c["window_size"] // side, full=full,
                        tokens_per_second=float(c["tokens_per_second"]))  # fmt: skip


def _read_table_tower(raw: Raw, defaults: Mapping[str, Any]) -> TableConfig:
    c, where = tower_fields(raw, defaults), "vision_config."
    require_all(c, {"hidden_act": defaults["hidden_act"], "in_channels": 3}, where)
    table = math.isqrt(positive(where + "num_position_embeddings", c["num_position_embeddings"]))
    if table**2 != c["num_position_embeddings"]:
        raise InputError(f"config.json: {where}num_position_embeddings={c['num_position_embeddings']} must be a square")
    sizes, deep = read_sizes(c, SIZES), c["deepstack_visual_indexes"]
    are_indices = isinstance(deep, list | tuple) and all(isinstance(i, int) and 0 <= i < c["depth"] for i in deep)
    if not are_indices or list(deep) != sorted(set(deep)):
        raise InputError(f"config.json: {where}deepstack_visual_indexes={deep!r} must be increasing indices of "
                         f"{c['depth']} blocks")  # fmt: skip
    return TableConfig(
        **sizes, activation=c["hidden_act"], norm="layer_norm", gated=False, deep=tuple(deep), table=table
    )


class Qwen3Vl(NativeModel):
    """The mergers in `deep` are those of DeepStack; the k-th is added after the decoder's layer k."""

    tower = TableTower


FAMILIES = {
    **{
        kind: Family(config=Qwen2VlConfig, model=NativeModel, names=stored_names(kind))
        for kind in ("qwen2_vl", "qwen2_5_vl")
    },
    **{
        kind: Family(config=config, model=Qwen3Vl, names=stored_names("qwen3_vl"))
        for config, kinds in ((Qwen3VlConfig, ("qwen3_vl", "qwen3_vl_moe")), (Qwen35Config, ("qwen3_5", "qwen3_5_moe")))
        for kind in kinds
    },
}
