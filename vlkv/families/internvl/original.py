"""InternVL-Chat-V1.5 and InternVL2 to InternVL3.5 in their authors' form (`internvl_chat`).

`config.json` contains neither the id of the image token nor that of the stop token. Both are looked up by their text
among the tokenizer's added tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from vlkv.config import Raw, filled, is_token_id, positive, require
from vlkv.errors import InputError
from vlkv.families.internvl.config import InternVitConfig, InternVlWiring
from vlkv.families.internvl.conversations import CONVERSATIONS
from vlkv.families.internvl.inputs import KIND, TOKEN, TilesConfig
from vlkv.families.text.config import read_decoder
from vlkv.processing.templates import ChatTemplate


class _ChatVitConfig(InternVitConfig):
    """InternViT with the defaults of the authors' class."""

    defaults: ClassVar = dict(
        model_type="intern_vit_6b", hidden_size=3200, intermediate_size=12800, num_hidden_layers=48,
        num_attention_heads=25, image_size=224, patch_size=14, norm_type="rms_norm", layer_norm_eps=1e-6,
        qkv_bias=False, qk_normalization=True,
    )  # fmt: skip


class InternVlChatConfig(TilesConfig):
    """The form of `config.json` that the authors' code reads."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        decoder = read_decoder({"text_config": raw.get("llm_config")})
        # Not supported: an older pixel shuffle, and LoRA weights that are not merged.
        require("ps_version", raw.get("ps_version", "v1"), "v2")
        for field in ("use_backbone_lora", "use_llm_lora", "pad2square"):
            require(field, int(raw.get(field, 0)), 0)
        tower = raw.get("vision_config") or {}
        c = filled(tower, _ChatVitConfig.defaults)
        vision = _ChatVitConfig.from_hf(
            tower, raw.get("select_layer", -1), norm=c["norm_type"], qkv_bias=bool(c["qkv_bias"]),
            qk_norm_eps=c["layer_norm_eps"] if c["qk_normalization"] else None,
        )  # fmt: skip
        require("force_image_size", raw.get("force_image_size") or vision.image_size, vision.image_size)
        require("template", raw.get("template"), *CONVERSATIONS)
        conversation = CONVERSATIONS[raw["template"]]
        tiled = bool(raw.get("dynamic_image_size", False))
        fewest = positive("min_dynamic_patch", raw.get("min_dynamic_patch", 1)) if tiled else 1
        most = positive("max_dynamic_patch", raw.get("max_dynamic_patch", 6)) if tiled else 1
        if fewest > most:
            raise InputError(f"config.json: min_dynamic_patch={fewest} is above max_dynamic_patch={most}")
        return {
            "decoder": decoder,
            "vision": vision,
            "image_token": _id(raw, TOKEN),
            "stop": (_id(raw, conversation.separator.strip()),),
            "wiring": InternVlWiring.of(raw, vision, min_tiles=fewest, max_tiles=most, conversation=conversation,
                                        thumbnail=bool(raw.get("use_thumbnail", False))),
        }  # fmt: skip

    def template(self, folder: Path) -> ChatTemplate:
        """The chat template of the conversation that the config names; the folder has none."""
        c = self.wiring.conversation
        opening = {"user": c.user, "assistant": c.assistant}
        text = (
            f"{{{{ {json.dumps(c.system + c.separator)} }}}}"
            f"{{% for message in messages %}}{{{{ {json.dumps(opening)}[message.role] }}}}{{{{ message.content }}}}"
            f"{{{{ {json.dumps(c.separator)} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {json.dumps(c.assistant)} }}}}{{% endif %}}"
        )
        return ChatTemplate.from_text(text, "config.json: template")

    def settings(self, folder: Path) -> tuple[dict[str, Any], str]:
        """The settings, and the file that they depend on: the authors' constants, because no file contains them."""
        size = {"height": self.vision.image_size, "width": self.vision.image_size}
        own = dict(image_processor_type=KIND, size=size, image_mean=(0.485, 0.456, 0.406),
                   image_std=(0.229, 0.224, 0.225), min_patches=self.wiring.min_tiles,
                   max_patches=self.wiring.max_tiles)  # fmt: skip
        return own, str(folder / "config.json")

    @override
    def video_settings(self, folder: Path) -> tuple[dict[str, Any], str]:
        return self.settings(folder)


def _id(raw: Raw, token: str) -> int:
    number = (raw.get("added_tokens") or {}).get(token)
    if not is_token_id(number):
        raise InputError(f"the id of {token} is not in tokenizer.json, tokenizer_config.json or added_tokens.json; "
                         "copy them from the checkpoint")  # fmt: skip
    return number
