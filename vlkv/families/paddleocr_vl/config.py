"""Config of PaddleOCR-VL and its published sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from vlkv.config import Raw, filled, number, positive, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.paddleocr_vl.inputs import ImagesConfig, PaddleOcrVlPictures
from vlkv.families.paddleocr_vl.tower import PaddleOcrVlVisionConfig
from vlkv.families.text.config import read_stop
from vlkv.families.text.kinds import Kind
from vlkv.processing.pictures import Pictures
from vlkv.processing.pixels import Layout
from vlkv.towers.native import check_decoder, read_sizes

# Class defaults in transformers. With `use_bias` the MLP would have biases too.
_DECODER = Kind(defaults=dict(
    vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18, num_attention_heads=16,
    num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=131072, rope_theta=5e5,
    use_bias=False,
))  # fmt: skip
_TOWER: dict[str, Any] = dict(
    hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, num_channels=3,
    image_size=384, patch_size=14, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6, spatial_merge_size=2,
)  # fmt: skip
_SIZES = {"width": "hidden_size", "mlp_width": "intermediate_size", "layers": "num_hidden_layers",
          "heads": "num_attention_heads", "patch_size": "patch_size", "merge": "spatial_merge_size"}  # fmt: skip
_TIE = "tie_word_embeddings"


class PaddleOcrVlConfig(ImagesConfig):
    """PaddleOCR-VL, PaddleOCR-VL-1.5 and 1.6."""

    prompt_format = (  # that of the first published checkpoint
        "<|begin_of_sentence|>{% for message in messages %}{% if message.role == 'assistant' %}Assistant: "
        "{{ message.content[0].text }}</s>{% else %}User: "
        "{% for item in message.content if item.type == 'image' %}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
        "{% endfor %}{% for item in message.content if item.type == 'text' %}{{ item.text }}{% endfor %}"
        "{{ '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
    )

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        return PaddleOcrVlPictures(settings=self.read_settings(folder, layout, ("image",)), config=self.vision)

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


def _read_tower(raw: Raw, out_width: int) -> PaddleOcrVlVisionConfig:
    c, where = filled(raw, _TOWER), "vision_config."
    require_all(c, {"hidden_act": _TOWER["hidden_act"], "num_channels": 3}, where)
    sizes = read_sizes(c, _SIZES)
    if positive(where + "image_size", c["image_size"]) < c["patch_size"]:
        raise InputError(f"config.json: {where}image_size={c['image_size']} is less than patch_size={c['patch_size']}")
    return PaddleOcrVlVisionConfig(
        **sizes, out_width=out_width, frames=1, activation=c["hidden_act"], norm="layer_norm", gated=False,
        norm_eps=number(where + "layer_norm_eps", c["layer_norm_eps"]), table=c["image_size"] // c["patch_size"],
    )  # fmt: skip
