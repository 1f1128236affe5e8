"""Tensor names of Qwen-VL. Queries, keys and values are fused: in the tower by head, elsewhere by rows."""

from __future__ import annotations

from checkpoints_convert.entry import Fused, Name, Names
from vlkv.config import ModelConfig
from vlkv.families.text.weights import below

_QKV = ("query", "key", "value")
_DECODER_AND_TOWER: dict[str, Name] = {
    "decoder.embedding": "wte", "decoder.norm": "ln_f", "decoder.layers.*.attention_norm": "h.*.ln_1",
    **{f"decoder.layers.*.{name}": Fused("h.*.attn.c_attn") for name in _QKV},
    "decoder.layers.*.out": "h.*.attn.c_proj", "decoder.layers.*.mlp_norm": "h.*.ln_2",
    "decoder.layers.*.gate": "h.*.mlp.w2", "decoder.layers.*.up": "h.*.mlp.w1",
    "decoder.layers.*.down": "h.*.mlp.c_proj",
    "vision.patch": "visual.conv1.weight", "vision.position": "visual.positional_embedding",
    "vision.first_norm": "visual.ln_pre", "vision.last_norm": "visual.ln_post", "vision.last": "visual.proj",
}  # fmt: skip
_OURS = _DECODER_AND_TOWER | below("vision.blocks.*.", "visual.transformer.resblocks.*.", {
    "attention_norm": "ln_1", "out": "attn.out_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj",
    **{f"{name}.{leaf}": Fused(f"attn.in_proj.{leaf}", by_head=True) for name in _QKV for leaf in ("weight", "bias")},
}) | below("vision.resampler.", "visual.attn_pool.", {
    "tokens": "query", "position": "pos_embed", "inner": "kv_proj", "query_norm": "ln_q", "key_norm": "ln_kv",
    **{f"{name}.{leaf}": Fused(f"attn.in_proj_{leaf}") for name in _QKV for leaf in ("weight", "bias")},
    "out": "attn.out_proj",
})  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters."""
    return Names(ours=below("", "transformer.", _OURS) | {"decoder.head": "lm_head"})
