"""LLaVA-NeXT, NeXT-Video, OneVision and Video: a tower over tiles and frames, a projector, a decoder.

The configs are in transformers' form and in the authors'. That of LLaVA-Video and OneVision (LlavaQwenForCausalLM) is
Qwen2's with fields for the tower (`mm_...`). The authors' code ignores `text_config` and the `vision_config` of other
towers, so we do too. inputs.py decides on the host which patches are mixed, and where each embedding is used.

Axes: R vision embeddings of the batch in one list · M mixed ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from typing_extensions import override

from vlkv.config import ModelConfig, Raw, positive, require, require_all, token_id
from vlkv.decoder.layers import Initializer
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import read_stop, tied_by_either
from vlkv.families.family import Family, VisionLanguageModel, flat
from vlkv.families.llava_form import PINPOINTS, TILES, claims_video, known_tower, read_common
from vlkv.families.llava_next.inputs import AnyResConfig
from vlkv.families.names import stored_names
from vlkv.inputs import Inputs
from vlkv.processing.templates import stored
from vlkv.towers.vit import ClipConfig, SiglipConfig

# SigLIP has 27 blocks; the family does not use the last one.
SIGLIP = dict(model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304, num_hidden_layers=26,
              num_attention_heads=16, image_size=384, patch_size=14, vision_use_head=False)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoPooling:
    """How the patches of a video frame are pooled."""

    mode: Literal["average", "bilinear"]  # mean pooling, or bilinear resizing of the frame
    # Factor by which the patches per side decrease. If it does not divide them, "average" rounds down, "bilinear" up.
    stride: int = 2
    newline: Literal["line", "frame", "video", "none"] = "none"  # after which of these the newline embedding is added
    before_projector: bool = False  # patches are pooled before they are projected

    @property
    def taps(self) -> int:
        """Source patches of one token."""
        return 4 if self.mode == "bilinear" else self.stride**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnyRes:
    """How images of any resolution, and videos, become tokens."""

    pinpoints: tuple[tuple[int, int], ...]  # height and width of what an image may be resized to before it is cut
    most_tiles: int | None = (
        None  # an image with more patches than these tiles have is resized to that number; None: never
    )
    only_alone: bool = False  # cut an image into tiles only if it is the only one of its prompt
    rounded: bool = True  # as in `without_padding`: True in transformers, False in the authors' code
    video: VideoPooling | None = None  # None for a family without video

    @property
    def taps(self) -> int:
        """The greatest number of source patches of one token; 0 if every token is one patch."""
        return max(0 if self.most_tiles is None else 4, 0 if self.video is None else self.video.taps)


class LlavaNextConfig(AnyResConfig):
    """LLaVA-NeXT: a CLIP tower and any decoder."""

    kind = "LlavaNextImageProcessor"

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        # The class token must be dropped, because the patches of all tiles form one grid.
        require_all(raw, {"vision_feature_select_strategy": "default", "use_image_newline_parameter": True})
        tower = ClipConfig.from_config_json(raw)
        points = read_pinpoints(raw.get("image_grid_pinpoints") or PINPOINTS, tower.image_size)
        raw = {"tie_word_embeddings": False, **raw}  # that of `text_config` is not used in this family
        return read_common(raw, 32000) | {"vision": tower, "wiring": AnyRes(pinpoints=points)}


class LlavaNextVideoConfig(AnyResConfig):
    """LLaVA-NeXT-Video: frames are pooled before they are projected, and no newline is added."""

    kind = "LlavaNextImageProcessor"
    video_kind = "LlavaNextVideoVideoProcessor"

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        fields = LlavaNextConfig.read(raw)
        require_all(raw, {"spatial_pool_mode": "average"})
        stride = positive("spatial_pool_stride", raw.get("spatial_pool_stride", 2))
        video = VideoPooling(mode="average", stride=stride, before_projector=True)
        common = read_common(tied_by_either(raw), 32001, 32000)
        return fields | common | {"wiring": dataclasses.replace(fields["wiring"], video=video)}


class LlavaOnevisionConfig(AnyResConfig):
    """LLaVA-OneVision: a SigLIP tower and a Qwen2 decoder."""

    kind = "LlavaOnevisionImageProcessor"
    video_kind = "LlavaOnevisionVideoProcessor"
    prompt_format = stored("llava_onevision")  # `qwen_1_5` in the authors' code

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        # "default" would drop the first patch, because the tower has no class token.
        require_all(raw, {"vision_feature_select_strategy": "full", "use_image_newline_parameter": True})
        vision = SIGLIP if raw.get("vision_config") is None else raw["vision_config"]
        tower = SiglipConfig.from_hf(vision, raw.get("vision_feature_layer", -1), whole=False)
        decoder = {"model_type": "qwen2", **(raw.get("text_config") or {})}
        return read_common(tied_by_either({**raw, "text_config": decoder}), 151646, 151647) | {
            "vision": tower,
            "wiring": AnyRes(
                pinpoints=read_pinpoints(raw.get("image_grid_pinpoints") or TILES, tower.image_size),
                most_tiles=read_most_tiles(raw.get("vision_aspect_ratio", "anyres_max_9"), "vision_aspect_ratio"),
                only_alone=True,
                video=VideoPooling(mode="bilinear", newline="video"),
            ),
        }


def read_pinpoints(value: Any, side: int) -> tuple[tuple[int, int], ...]:
    """Checks `image_grid_pinpoints`: pairs of pixels, multiples of a tile's `side`; InputError otherwise."""
    pairs = isinstance(value, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair)
        for pair in value
    )
    if not pairs or not value:
        raise InputError(f"config.json: image_grid_pinpoints={value!r} must be a list of [height, width]")
    for pair in value:
        if any(n % side for n in pair):
            raise InputError(f"config.json: image_grid_pinpoints has {list(pair)}: not a multiple of {side} pixels, "
                             "the side of a tile")  # fmt: skip
    return tuple((int(pair[0]), int(pair[1])) for pair in value)


def read_most_tiles(value: Any, field: str) -> int:
    """The number N of a value "anyres_max_N"; InputError for other values."""
    number = value.removeprefix("anyres_max_") if isinstance(value, str) and value.startswith("anyres_max_") else ""
    if not number.isdecimal() or not int(number):
        raise InputError(f"config.json: {field}={value!r} is not supported (only anyres_max_N)")
    return int(number)


_NEWLINES = {"grid": "line", "frame": "frame", "one_token": "video", "no_token": "none"}
_ONE_VALUE = {
    "mm_projector_type": "mlp2x_gelu", "mm_patch_merge_type": "spatial_unpad", "mm_vision_select_feature": "patch",
    "mm_resampler_type": None, "mm_use_im_start_end": False, "mm_use_im_patch_token": False,
    "add_faster_video": False, "use_pos_skipping": False, "use_image_newline_parameter": True,
}  # fmt: skip


class LlavaVideoConfig(AnyResConfig):
    """The form of `config.json` that the authors' code reads."""

    prompt_format = LlavaOnevisionConfig.prompt_format
    kind = video_kind = "SiglipImageProcessor"

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        require_all(raw, _ONE_VALUE)
        tower = SiglipConfig.from_hf(_tower(raw), -1, whole=False)
        decoder = {field: value for field, value in raw.items() if field not in ("text_config", "vision_config")}
        nested = {**raw, "text_config": {**decoder, "model_type": "qwen2"}}
        token = token_id(raw, "image_token_index", default=151646)  # for both images and videos
        return read_common(nested, token) | {
            "stop": read_stop(nested),
            "video_token": token,
            "projector_bias": True,
            "vision": tower,
            "wiring": AnyRes(
                pinpoints=read_pinpoints(_height_first(raw.get("image_grid_pinpoints"), tower.image_size),
                                         tower.image_size),
                most_tiles=read_most_tiles(raw.get("image_aspect_ratio"), "image_aspect_ratio"),
                only_alone=True,
                rounded=False,
                video=_video(raw),
            ),
        }  # fmt: skip


def _tower(raw: Raw) -> Raw:
    tower = raw.get("vision_config") or {}
    if tower.get("model_type") == "siglip_vision_model":
        return tower
    return known_tower(raw, {"siglip-so400m-patch14-384": SIGLIP})


def _video(raw: Raw) -> VideoPooling:
    mode, newline = raw.get("mm_spatial_pool_mode", "bilinear"), raw.get("mm_newline_position", "one_token")
    require("mm_spatial_pool_mode", mode, "average", "bilinear")
    require("mm_newline_position", newline, *_NEWLINES)
    stride = positive("mm_spatial_pool_stride", raw.get("mm_spatial_pool_stride") or 2)
    return VideoPooling(mode=mode, stride=stride, newline=_NEWLINES[newline])  # type: ignore[arg-type]  # checked above


def _height_first(value: Any, side: int) -> Any:
    """Pinpoints with the height first. Here they are (width, height), or a range of tiles: "(1x1),...,(6x6)"."""
    if isinstance(value, str):
        ends = re.findall(r"\((\d+)x(\d+)\)", value)
        if len(ends) < 2:
            raise InputError(f"config.json: image_grid_pinpoints={value!r} is not a range such as (1x1),...,(6x6)")
        first, last = ([int(n) for n in end] for end in (ends[0], ends[-1]))
        value = [[x * side, y * side] for x in range(first[0], last[0] + 1) for y in range(first[1], last[1] + 1)]
    return [pair[::-1] if isinstance(pair, list) else pair for pair in value] if isinstance(value, list) else value


class LlavaNext(VisionLanguageModel):
    """The attention of a mixed token is the weighted sum over its patches; that of a newline is 0."""

    newline: nnx.Param

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module | None:
        projector = super().make_projector(config, init=init)
        self.newline = init.normal(config.decoder.width, scale=config.decoder.width**-0.5)
        return projector

    def project(self, features: Float[Array, "I V d"], inputs: Inputs) -> Float[Array, "R D"]:
        """Embeddings of the patches, the mixed embeddings, and the newline."""
        patches, video = flat(features), self.config.wiring.video
        if video is not None and video.before_projector:
            vision = self.projector(with_mixed(patches, inputs))
        else:
            vision = with_mixed(self.projector(patches), inputs)
        return jnp.concatenate([vision, self.newline[...][None]])

    @override
    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        return jnp.pad(with_mixed(flat(attention), inputs), [(0, 1), (0, 0)])


def with_mixed(patches: Float[Array, "R D"], inputs: Inputs) -> Float[Array, "_ D"]:
    """The patches, followed by the mixed embeddings that `inputs.layout` describes."""
    taps: Any = inputs.layout.get("taps")
    if taps is None or not taps.shape[0]:
        return patches
    return jnp.concatenate([patches, mix(patches, taps, inputs.layout["weights"])])


def mix(patches: Float[Array, "R D"], taps: Int[Array, "M k"], weights: Float[Array, "M k"]) -> Float[Array, "M D"]:
    """Weighted sums of patches, computed in float32. One gather per tap avoids an array of size M k D."""
    total = jnp.zeros((taps.shape[0], patches.shape[1]), jnp.float32)
    for k in range(taps.shape[1]):
        total = total + weights[:, k, None] * patches[taps[:, k]].astype(jnp.float32)
    return total.astype(patches.dtype)


FAMILIES = {
    "llava_next": Family(config=LlavaNextConfig, model=LlavaNext, names=stored_names("llava_next")),
    "llava_next_video": Family(config=LlavaNextVideoConfig, model=LlavaNext, names=stored_names("llava_next")),
    "llava_onevision": Family(config=LlavaOnevisionConfig, model=LlavaNext, names=stored_names("llava_next")),
    # LLaVA-Video and OneVision in their authors' form.
    "llava_qwen": Family(
        config=LlavaVideoConfig, model=LlavaNext, names=stored_names("llava_qwen"), claims=claims_video
    ),
}
