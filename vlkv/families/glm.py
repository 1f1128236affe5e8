"""GLM-4.1V and GLM-4.6V-Flash (GLM-V Team 2025, arXiv:2507.01006), and GLM-OCR (2026), with M-RoPE.

Images become patches as in Qwen2-VL. All tokens of an image, <|image|>, are vision tokens; the marks around it
(<|begin_of_image|>, <|end_of_image|>) are text. A video is a list of frames of the tower, each made of two pictures,
with marks like an image and then its time as text: the time of the first picture, in whole seconds or with one digit
after the point. Each frame has positions and a grid like an image, so policies treat it as one. The tokens of frames
are <|image|> too; a pair of marks around the whole video, which are text, tells them from images.

The limits of pixels apply to both pictures of a patch, so an image may have half as many, and to all pictures of a
video together.

Axes: F frames · n patches of a frame with padding · C values of a patch · D width · m patches per side of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int
from typing_extensions import override

from vlkv.buckets import Buckets
from vlkv.config import ModelConfig, Raw, number, positive, require, require_all, token_id
from vlkv.decoder.layers import Embedding, GatedMlp, Initializer, LayerNorm, Linear, gelu
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import Kind, read_stop, tied_by_either
from vlkv.families.family import Family
from vlkv.families.models import NativeModel
from vlkv.families.names import stored_names
from vlkv.files import class_defaults, read_json
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens
from vlkv.processing.native import NativeResolutionConfig, TimedPictures
from vlkv.processing.pixels import Kinds, Layout, PictureKind
from vlkv.towers.native import SIZES, NativeConfig, NativeTower, check_decoder, cubic_weights, read_sizes, tower_fields

_FRAME = -1  # replaces the image token in videos
# Processors in transformers -> whether they write the time of a frame in whole seconds.
_WHOLE_SECONDS = {"Glm4vProcessor": True, "Glm46VProcessor": False}
_MOE = "glm4v_moe"
_DEFAULTS = class_defaults("glm")
_KIND: dict[str, Any] = dict(names="glm", partial=True, neighbours=True, sandwich_norms=True)
_DECODERS = {
    "glm4v_text": Kind(qkv_bias=True, defaults=_DEFAULTS["glm4v_text"], **_KIND),
    "glm_ocr_text": Kind(defaults=_DEFAULTS["glm_ocr_text"], **_KIND),
}
# The default stop token, <|endoftext|>.
_END = {"glm4v": 151329, "glm46v": 151329, "glm_ocr": 59246}


def has_experts(raw: Raw) -> bool:
    """Whether this is the form of GLM-4.5V and GLM-4.6V (106B) with experts, which `GlmConfig.read` refuses by name."""
    return raw.get("model_type") == _MOE


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmPictures(TimedPictures):
    """Converts images and videos to patches."""

    spelled: ClassVar[Mapping[str, str]] = {"video": "<|video|>"}

    whole_seconds: bool  # of the time of a frame

    @override
    def frame(self, first: float, last: float, tokens: int) -> str:
        time = str(int(first)) if self.whole_seconds else f"{first:.1f} seconds"
        return f"<|begin_of_image|>{'<|image|>' * tokens}<|end_of_image|>{time}"

    @override
    def _scaled(self, height: int, width: int, kind: PictureKind, frames: int) -> tuple[int, int]:
        c = self.config
        count = c.frames if kind == "image" else frames  # an image is repeated
        return self.settings[kind].scaled_together(height, width, c.patch_size * c.merge, count, c.frames)


class GlmConfig(NativeResolutionConfig):
    """GLM-4.1V and GLM-4.6V-Flash (`glm4v`, `glm46v`), and GLM-OCR (`glm_ocr`), which differ in sizes and norms.

    Images and frames of videos have the same token; `wiring` has the ids of the marks before and after a video.
    """

    frames_apart: ClassVar = True
    processors: ClassVar[Kinds] = {name: fields for name, fields in _DEFAULTS.items() if name.endswith("Processor")}
    kinds: ClassVar[Mapping[PictureKind, str]] = {"image": "Glm46VImageProcessor", "video": "Glm46VVideoProcessor"}

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> GlmPictures:
        settings, seconds = self.read_settings(folder, layout), _WHOLE_SECONDS[self._processor(folder)]
        return GlmPictures(settings=settings, config=self.vision, whole_seconds=seconds)

    def _processor(self, folder: Path) -> str:
        """The processor that a folder names, from the files that transformers reads, in its order."""
        for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
            processor = (read_json(folder / file) or {}).get("processor_class")
            if processor is not None:
                if processor not in list(_WHOLE_SECONDS):
                    raise InputError(f"{folder / file}: processor_class={processor!r} is not supported (supported: "
                                     f"{', '.join(_WHOLE_SECONDS)})")  # fmt: skip
                return processor
        return "Glm4vProcessor" if self.family == "glm4v" else "Glm46VProcessor"

    @property
    @override
    def picture_tokens(self) -> dict[PictureKind, int | None]:
        return {"image": self.image_token, "video": _FRAME}

    @override
    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        # Frames of videos have the token of images, so they are found by the marks around the video.
        started, ended = (np.cumsum(tokens == mark, axis=1) for mark in self.wiring)
        in_video = (started > ended) & (tokens == self.image_token)
        return super().arrange(batch, np.where(in_video, _FRAME, tokens), valid, buckets)

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        family, part = raw["model_type"], dict(raw.get("text_config") or {})
        if str(part.get("model_type")).startswith(_MOE) or "n_routed_experts" in part:
            raise InputError(f"config.json: {_MOE} (GLM-4.5V, GLM-4.6V) is not supported, because its router has a "
                             "correction bias and groups; GLM-4.6V-Flash is supported")  # fmt: skip
        ocr = family == "glm_ocr"
        name = "glm_ocr_text" if ocr else "glm4v_text"
        require("text_config.model_type", part.get("model_type", name), name)
        tied = raw if family == "glm46v" else tied_by_either(raw)
        part["tie_word_embeddings"] = bool(tied.get("tie_word_embeddings"))
        if ocr:
            require_all(part, {"attention_bias": False}, "text_config.")
        decoder = _DECODERS[name].read(part)
        if not ocr and decoder.head_dim * decoder.heads != decoder.width:  # transformers uses head_dim in RoPE only
            raise InputError(f"config.json: text_config.head_dim={decoder.head_dim}: {decoder.heads} heads must have "
                             f"{decoder.width} channels together")  # fmt: skip
        vision = _read_tower(raw.get("vision_config") or {}, ocr=ocr)
        check_decoder(decoder, vision.out_width)
        image, start, end = (token_id(raw, field, default=token) for field, token in _DEFAULTS[family].items())
        return {
            "decoder": decoder,
            "vision": vision,
            "image_token": image,
            "wiring": (start, end),
            "stop": read_stop(raw, _END[family]),
        }


def _read_tower(raw: Raw, *, ocr: bool) -> GlmVisionConfig:
    """The tower of `vision_config`. That of GLM-OCR has no table of positions; its queries and keys are normalised."""
    c, where = tower_fields(raw, _DEFAULTS["glm_ocr_vision" if ocr else "glm4v_vision"]), "vision_config."
    names = ("glm_ocr_vision", "glm_ocr") if ocr else ("glm4v_vision", "glm4v")
    require(where + "model_type", c.get("model_type", names[0]), *names)
    require_all(c, {"hidden_act": "silu", "in_channels": 3, "temporal_patch_size": 2}, where)
    require(where + "attention_bias", c["attention_bias"], True, False)
    sizes, bias, eps = read_sizes(c, SIZES), c["attention_bias"], number(where + "rms_norm_eps", c["rms_norm_eps"])
    if positive(where + "image_size", c["image_size"]) < c["patch_size"]:
        raise InputError(f"config.json: {where}image_size={c['image_size']} must be at least patch_size")
    inner, out = sizes["mlp_width"], sizes["out_width"]
    # The MLPs of the blocks of GLM-4.1V have `out_hidden_size` channels, and its merger has `intermediate_size`.
    widths = sizes | dict(mlp_width=inner if ocr else out, merger_width=3 * out if ocr else inner)
    return GlmVisionConfig(
        **widths, activation="silu", norm="rms_norm", norm_eps=eps, gated=True, qkv_bias=bias, out_bias=ocr and bias,
        mlp_bias=ocr and bias, qk_norm_eps=eps if ocr else None,
        table=None if ocr else c["image_size"] // c["patch_size"],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmVisionConfig(NativeConfig):
    """A tower with RMSNorms and gated MLPs."""

    table: int | None  # positions per side of a square table that is added to the patches; None (GLM-OCR): none
    merger_width: int  # channels of the merger's gated MLP
    norm_eps: float = dataclasses.field()
    qkv_bias: bool = dataclasses.field()
    out_bias: bool = dataclasses.field()
    mlp_bias: bool = dataclasses.field()
    qk_norm_eps: float | None = dataclasses.field()  # of the norms of queries and keys; None (GLM-4.1V): none

    patch_bias = True
    qk_norm_by_head = True


class GlmTower(NativeTower):
    """Patch embedding, with a norm and positions if there is a table, and blocks."""

    config: GlmVisionConfig

    def __init__(self, c: GlmVisionConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.patch_norm = None if c.table is None else c.make_norm(init=init)
        self.positions = None if c.table is None else Embedding(c.table**2, c.width, init=init)

    @override
    def embed(self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"]) -> Float[Array, "F n D"]:
        x = self.patch(pixels)
        if self.config.table is None or self.positions is None or self.patch_norm is None:
            return x
        lines, columns = (cubic_weights(place[..., axis], self.config.table) for axis in (0, 1))
        weight = (lines[..., :, None] * columns[..., None, :]).reshape(*place.shape[:2], -1)
        position = jnp.einsum("fns,sd->fnd", weight, self.positions.weight[...].astype(jnp.float32))
        return self.patch_norm(x) + position.astype(x.dtype)


class Downsample(nnx.Module):
    """A convolution whose stride is the size of its kernel. Weight [out, in, m, m]."""

    def __init__(self, width_in: int, width_out: int, side: int, *, init: Initializer) -> None:
        self.weight = init.normal(width_out, width_in, side, side, scale=(width_in * side**2) ** -0.5)
        self.bias = init.constant(0.0, width_out)

    def __call__(self, x: Float[Array, "F n i"]) -> Float[Array, "V o"]:
        """One vector for m x m patches, which are neighbours in `x`."""
        side = self.weight.shape[-1]
        x = rearrange(x, "f (v a b) i -> (f v) a b i", a=side, b=side)
        return jnp.einsum("vabi,oiab->vo", x, self.weight[...]) + self.bias[...]


class GlmMerger(GatedMlp):
    """Norm, downsampling convolution, linear, LayerNorm, exact (erf) GELU, gated MLP."""

    def __init__(self, c: GlmVisionConfig, *, init: Initializer) -> None:
        self.norm = c.make_norm(init=init)
        self.downsample = Downsample(c.width, c.out_width, c.merge, init=init)
        self.linear = Linear(c.out_width, c.out_width, bias=False, init=init)
        self.linear_norm = LayerNorm(c.out_width, 1e-5, init=init)
        super().__init__(c.out_width, c.merger_width, init=init)

    @override
    def __call__(self, x: Float[Array, "F n i"]) -> Float[Array, "V D"]:
        return super().__call__(gelu(self.linear_norm(self.linear(self.downsample(self.norm(x))))))


class Glm(NativeModel):
    """The projector makes a token of merge x merge patches."""

    tower = GlmTower

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return GlmMerger(config.vision, init=init)


FAMILIES = {
    kind: Family(config=GlmConfig, model=Glm, names=stored_names(names), claims=has_experts)
    for kind, names in {"glm4v": "glm4v", "glm46v": "glm4v", "glm_ocr": "glm_ocr"}.items()
}
