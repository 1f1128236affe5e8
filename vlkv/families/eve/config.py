"""EVE-7B and EVE-7B-HD.

The checkpoint only names its patch layer, and the file with the settings of that layer was never published. So they
are written here. The name contains the longer side of an image in pixels. Patches have 14 pixels and windows 2 patches
per side in both models; for HD we conclude this from its 4096 positions, which no other window fits.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from vlkv.config import Raw, positive, require
from vlkv.errors import InputError
from vlkv.families.eve.inputs import WindowsConfig
from vlkv.families.eve.patches import EvePatchesConfig
from vlkv.families.llava.original import known_tower
from vlkv.families.text.config import KINDS

_LONGEST = {"eve-patch14-anypixel-672": 672, "eve-patch14-anypixel-1344": 1344}


class EveConfig(WindowsConfig):
    """The form of `config.json` that the authors' code reads."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        longest = known_tower(raw, _LONGEST)
        require("mm_projector_type", raw.get("mm_projector_type", "linear"), "mlp2x_gelu")
        require("mm_use_im_start_end", bool(raw.get("mm_use_im_start_end", False)), False)
        width = positive("mm_hidden_size", raw.get("mm_hidden_size", 1024))
        vision = EvePatchesConfig(width=width, longest=longest)
        if width % vision.heads:
            raise InputError(f"config.json: mm_hidden_size={width} must be a multiple of {vision.heads}")
        decoder = KINDS["llama"].read(raw)
        # The vocabulary has no image token, so the first id after it is used.
        return {"decoder": decoder, "vision": vision, "image_token": decoder.vocab_size}
