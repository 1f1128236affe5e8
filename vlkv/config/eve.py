"""EVE-7B and EVE-7B-HD (Diao et al. 2024, version 1): no encoder, a layer of patches before the decoder.

The checkpoint only names its patch layer, and the file of that name was never published with it; its numbers stand
here. The name gives the longest side of a picture; patches and windows are 14 and 2 in both (for HD an inference: no
other window fits its 4096 positions).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import positive, require
from vlkv.config.decoder import DecoderConfig
from vlkv.config.llava_original import tower_folder
from vlkv.errors import InputError

_LONGEST = {"eve-patch14-anypixel-672": 672, "eve-patch14-anypixel-1344": 1344}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveVisionConfig:
    """The patch layer."""

    width: int
    longest: int  # pixels of a picture's longer side
    heads: int = 8
    patch_size: int = 14
    window: int = 2  # patches per side that become one token
    coarse: int = 24  # steps in which the shorter side grows, to the longer one
    norm_eps: float = 1e-5

    @property
    def window_size(self) -> int:
        """Pixels per side that become one token."""
        return self.patch_size * self.window


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; raises InputError for what we do not honour."""
    name = tower_folder(raw)
    if name not in _LONGEST:
        raise InputError(f"config.json: mm_vision_tower={raw['mm_vision_tower']!r} is not supported "
                         f"(only {', '.join(_LONGEST)})")  # fmt: skip
    require("mm_projector_type", raw.get("mm_projector_type", "linear"), "mlp2x_gelu")
    require("mm_use_im_start_end", bool(raw.get("mm_use_im_start_end", False)), False)
    vision = EveVisionConfig(width=positive("mm_hidden_size", raw.get("mm_hidden_size", 1024)), longest=_LONGEST[name])
    if vision.width % vision.heads:
        raise InputError(f"config.json: mm_hidden_size={vision.width} must be a multiple of {vision.heads}")
    decoder = DecoderConfig.from_hf("llama", raw)
    # No token of the vocabulary stands for an image: the id behind the last does.
    return {"decoder": decoder, "vision": vision, "image_token": decoder.vocab_size}
