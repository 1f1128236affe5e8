"""LLaVA-1.5 in transformers' form."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from vlkv.config import Raw, require_all, token_id
from vlkv.families.text.config import read_decoder, tied_by_either
from vlkv.processing.pixels import KINDS
from vlkv.processing.squares import SquareConfig
from vlkv.towers.vit import ClipConfig

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_SIDES = range(384, 2305, 384)  # pixels
TILES = [[height, width] for height in _SIDES for width in _SIDES]
_NEXT = dict(image_grid_pinpoints=PINPOINTS)
_WHOLE = dict(size={"height": 384, "width": 384}, do_center_crop=False, crop_size=None)
# Image and video processors of all LLaVA families in transformers.
LLAVA_KINDS: dict[str, dict[str, Any]] = KINDS | {
    "LlavaImageProcessor": {"padding": "square"}, "LlavaNextImageProcessor": _NEXT,
    "LlavaNextVideoImageProcessor": _NEXT, "LlavaNextVideoVideoProcessor": {},
    "LlavaOnevisionImageProcessor": dict(_WHOLE, image_grid_pinpoints=TILES), "LlavaOnevisionVideoProcessor": _WHOLE,
}  # fmt: skip


class LlavaConfig(SquareConfig):
    """A CLIP tower and any decoder. Every image becomes one square of patches."""

    kinds = LLAVA_KINDS
    kind = "LlavaImageProcessor"
    # The format in transformers' documentation of LLaVA-1.5.
    prompt_format = (
        "{% for message in messages %}{% if message.role == 'user' %}USER: {{ message.content }} ASSISTANT:"
        "{% else %} {{ message.content }}{{ eos_token | default('</s>') }}{% endif %}{% endfor %}"
    )

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        return read_common(tied_by_either(raw), 32000) | {"vision": ClipConfig.from_config_json(raw)}


def read_common(raw: Raw, image_token: int, video_token: int | None = None) -> dict[str, Any]:
    """The fields that all LLaVA families have in common.

    Args:
        raw: `config.json`.
        image_token: id of the image token if `raw` has none.
        video_token: id of the video token if `raw` has none; None: the family does not support videos.

    Raises:
        InputError: an unsupported projector or decoder.
    """
    require_all(raw, {"projector_hidden_act": "gelu"})

    def token(kind: str, default: int) -> int:
        # The second is a name of transformers 5 for the first, and decides if a file has both.
        return token_id(raw, f"{kind}_token_id", f"{kind}_token_index", default=default)

    return {
        "decoder": read_decoder(raw),
        "image_token": token("image", image_token),
        "video_token": None if video_token is None else token("video", video_token),
        "projector_bias": raw.get("multimodal_projector_bias", True),
    }
