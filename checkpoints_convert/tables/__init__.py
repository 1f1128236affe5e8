"""Which tensor of a checkpoint is which of our parameters: one table per family, checked as a whole.

Checkpoints on disk use two generations of names (transformers 4 and 5; version 5 still saves the old ones). Keys are
first brought to the new names by regular expression, then looked up. A family's module has RENAMES, `table(config)`
and `ignored(key, config)`.
"""

from __future__ import annotations

import re
from types import ModuleType

from checkpoints_convert.tables import (
    eve,
    internvl,
    internvl_chat,
    llava,
    llava_next,
    llava_original,
    llava_video,
    mobilevlm,
    qwen2_vl,
    qwen_vl,
    text,
)
from checkpoints_convert.tables.entry import Entry, Part
from vlkv.config import TEXT_FAMILIES, ModelConfig

_FAMILIES: dict[str, ModuleType] = {
    "llava": llava,
    "llava_llama": llava_original,
    "mobilevlm": mobilevlm,
    "qwen": qwen_vl,
    "eve": eve,
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), llava_next),
    "llava_qwen": llava_video,
    "internvl": internvl,
    "internvl_chat": internvl_chat,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), qwen2_vl),
    **dict.fromkeys(TEXT_FAMILIES, text),
}
# Buffers that old checkpoints carry and nobody needs.
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|position_ids)$")


def canonical(key: str, family: str) -> str:
    """The new-style name of a key found on disk."""
    for pattern, replacement in _FAMILIES[family].RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


def ignored(key: str, config: ModelConfig) -> bool:
    """Whether a (new-style) key is known but unused."""
    return bool(_BUFFERS.search(key)) or _FAMILIES[config.family].ignored(key, config)


def table(config: ModelConfig) -> list[Entry]:
    """All tensors that a model of this config needs."""
    return list(_FAMILIES[config.family].table(config))


__all__ = ["Entry", "Part", "canonical", "ignored", "table"]
