"""Tensor names of EVE: decoder, patch layer, projector."""

from __future__ import annotations

from checkpoints_convert.entry import Fused, Names
from vlkv.config import ModelConfig
from vlkv.families.text.weights import Ours, below, decoder

_ATTENTION: Ours = {
    "query_norm": "q.0", "query": "q.1", "key_norm": "kv.0", "out": "proj",
    **{name: Fused("kv.1", ("key", "value")) for name in ("key", "value")},
}  # fmt: skip
_PATCHES: Ours = {
    "patch": "patch_embedding.weight", "class_token": "class_embedding", "split_token": "split_embedding",
    **below("within.", "local_attention.", _ATTENTION), **below("whole.", "global_attention.", _ATTENTION),
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters. Tensors used only in training are unused: the teacher model and its comparison."""
    projector = below("projector.", "model.mm_projector.", {"first": "0", "second": "2"})
    return Names(
        ours=decoder(config, "model.") | below("vision.", "model.vision_tower.", _PATCHES) | projector,
        unused=r"^model\.(?:vision_clip|vision_tower_compressor)\.",
    )
