"""InternVL2 and InternVL-Chat-V1.5 as their authors published them (`internvl_chat`).

`config.json` names neither the image token nor the token that ends an answer: both are looked up by their spelling
among the tokenizer's added tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config import text
from vlkv.config.checks import positive, require
from vlkv.config.conversations import CONVERSATIONS
from vlkv.config.internvit import InternVitConfig
from vlkv.config.internvl import InternVlWiring, merged
from vlkv.errors import InputError

IMAGE_TOKEN = "<IMG_CONTEXT>"


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; raises InputError for what we do not honour."""
    # An older pixel shuffle, and weights that are not merged yet.
    for field, supported in (("ps_version", "v2"), ("use_backbone_lora", 0), ("use_llm_lora", 0)):
        require(field, raw.get(field, "v1" if field == "ps_version" else supported), supported)
    require("pad2square", bool(raw.get("pad2square", False)), False)
    vision = InternVitConfig.from_original(raw.get("vision_config") or {}, raw.get("select_layer", -1))
    require("force_image_size", raw.get("force_image_size") or vision.image_size, vision.image_size)
    merge = merged(raw.get("downsample_ratio", 0.5), vision)
    conversation = CONVERSATIONS.get(raw.get("template", ""))
    if conversation is None:
        raise InputError(f"config.json: template={raw.get('template')!r} is not supported "
                         f"(supported: {', '.join(CONVERSATIONS)})")  # fmt: skip
    tiled = bool(raw.get("dynamic_image_size", False))
    fewest = positive("min_dynamic_patch", raw.get("min_dynamic_patch", 1)) if tiled else 1
    most = positive("max_dynamic_patch", raw.get("max_dynamic_patch", 6)) if tiled else 1
    if fewest > most:
        raise InputError(f"config.json: min_dynamic_patch={fewest} is above max_dynamic_patch={most}")
    return {
        "decoder": text.decoder({"text_config": raw.get("llm_config")}),
        "vision": vision,
        "image_token": _id(raw, IMAGE_TOKEN),
        "stop": (_id(raw, conversation.stop),),
        "wiring": InternVlWiring(
            merge=merge,
            tokens=(vision.grid // merge) ** 2,
            min_tiles=fewest,
            max_tiles=most,
            thumbnail=bool(raw.get("use_thumbnail", False)),
            conversation=conversation,
        ),
    }


def _id(raw: Mapping[str, Any], token: str) -> int:
    added = raw.get("added_tokens") or {}
    if token not in added:
        raise InputError(f"config.json does not say which id {token} has, and neither tokenizer.json, "
                         "tokenizer_config.json nor added_tokens.json does; copy them from the checkpoint")  # fmt: skip
    return added[token]
