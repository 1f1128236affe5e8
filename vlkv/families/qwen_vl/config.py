"""Qwen-VL and Qwen-VL-Chat in their authors' form.

The decoder has Qwen2's shape. Prompts are limited to the length it was trained on (`seq_length`), up to which its
dynamic NTK scaling has no effect. Its log-length scaling affects tokens that are generated beyond that length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from vlkv.config import DecoderConfig, Raw, RopeConfig, filled, number, positives, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.qwen_vl.inputs import QueriesConfig
from vlkv.families.qwen_vl.tower import RESAMPLER_HEAD_DIM, QwenVlTowerConfig

# Special tokens of the authors' tokenizer (tokenization_qwen.py); their ids follow those of the ordinary tokens.
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)),
    "<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<img>", "</img>", "<imgpad>",
)  # fmt: skip
# Class defaults in the authors' code.
_DEFAULTS: dict[str, Any] = dict(
    vocab_size=151936, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=22016,
    layer_norm_epsilon=1e-6, kv_channels=128, max_position_embeddings=8192, seq_length=2048, rotary_emb_base=10000,
    use_dynamic_ntk=True, use_logn_attn=True, tie_word_embeddings=False, eos_token_id=151643,
)  # fmt: skip
_TOWER_DEFAULTS: dict[str, Any] = dict(n_queries=256, output_dim=512, image_start_id=151857)


class QwenVlConfig(QueriesConfig):
    """The form of `config.json` that the authors' code reads."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        if not isinstance(raw.get("visual"), Mapping):
            raise InputError("config.json: visual is missing: Qwen-VL is supported, the text model Qwen is not")
        c = filled(raw, _DEFAULTS)
        require_all(c, {"rotary_pct": 1.0, "scale_attn_weights": True, "no_bias": True})
        positives(c, ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                      "kv_channels", "max_position_embeddings", "seq_length"))  # fmt: skip
        if c["kv_channels"] % 2 or c["intermediate_size"] % 2:
            raise InputError("config.json: kv_channels and intermediate_size must be even")
        visual = {**_TOWER_DEFAULTS, **c["visual"]}
        length, eos = c["seq_length"], token_id(c, "eos_token_id", default=_DEFAULTS["eos_token_id"])
        start = token_id(visual, "image_start_id", default=_TOWER_DEFAULTS["image_start_id"])
        theta = number("rotary_emb_base", c["rotary_emb_base"], above=1)
        decoder = DecoderConfig(
            vocab_size=c["vocab_size"], width=c["hidden_size"], layers=c["num_hidden_layers"],
            mlp_width=c["intermediate_size"] // 2,  # the field is the sum for gate and up
            heads=c["num_attention_heads"], kv_heads=c["num_attention_heads"], head_dim=c["kv_channels"],
            norm_eps=c["layer_norm_epsilon"], rope=RopeConfig(theta=theta), qkv_bias=True,
            max_positions=length if c["use_dynamic_ntk"] else c["max_position_embeddings"],
            log_from=length if c["use_logn_attn"] else None, tied=bool(c["tie_word_embeddings"]),
        )  # fmt: skip
        return {
            "decoder": decoder,
            "vision": _read_tower(visual, c["hidden_size"]),
            "image_token": start + 2,  # the ids are those of <img>, </img>, <imgpad>
            "stop": (eos, eos + 2),  # <|endoftext|> and <|im_end|>
        }


def _read_tower(c: Raw, width: int) -> QwenVlTowerConfig:
    positives(c, ("image_size", "patch_size", "width", "layers", "heads", "n_queries", "output_dim"), "visual.")
    require("visual.output_dim", c["output_dim"], width)
    side = round(c["n_queries"] ** 0.5)
    if side**2 != c["n_queries"] or c["output_dim"] % RESAMPLER_HEAD_DIM or c["width"] % c["heads"]:
        raise InputError(
            f"config.json: visual: n_queries must be a square, output_dim a multiple of {RESAMPLER_HEAD_DIM}, "
            "and width a multiple of heads"
        )
    if c["image_size"] % c["patch_size"]:
        raise InputError("config.json: visual: patch_size must divide image_size")
    return QwenVlTowerConfig(
        width=c["width"], mlp_width=int(c["width"] * c["mlp_ratio"]), layers=c["layers"], heads=c["heads"],
        image_size=c["image_size"], patch_size=c["patch_size"], side=side,
        resampler_heads=width // RESAMPLER_HEAD_DIM,
    )  # fmt: skip
