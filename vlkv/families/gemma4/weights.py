"""Tensor names of Gemma 4 with images."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.text.weights import below, decoder, unused

_PRODUCTS = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_BLOCK = "encoder.layers.*."
_TOWER: dict[str, Name] = {
    "patch": "patch_embedder.input_proj", "positions": "patch_embedder.position_embedding_table",
    "bias": "std_bias", "scale": "std_scale",
    "blocks.*.attention_norm": f"{_BLOCK}input_layernorm",
    "blocks.*.attention_out_norm": f"{_BLOCK}post_attention_layernorm",
    "blocks.*.mlp_norm": f"{_BLOCK}pre_feedforward_layernorm",
    "blocks.*.mlp_out_norm": f"{_BLOCK}post_feedforward_layernorm",
    "blocks.*.query_norm": f"{_BLOCK}self_attn.q_norm", "blocks.*.key_norm": f"{_BLOCK}self_attn.k_norm",
    **{f"blocks.*.{ours}": f"{_BLOCK}{theirs}.linear" for ours, theirs in _PRODUCTS.items()},
    **{f"blocks.*.{ours}_bounds.{bound}": f"{_BLOCK}{theirs}.{bound}" for ours, theirs in _PRODUCTS.items()
       for bound in ("input_min", "input_max", "output_min", "output_max")},
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters. The tower for audio, of which E2B and E4B have one, is unused."""
    ours = decoder(config, "model.language_model.") | below("vision.", "model.vision_tower.", _TOWER)
    projector = {"projector": "model.embed_vision.embedding_projection"}
    return Names(ours=ours | projector, unused=rf"^model\.(?:audio_tower|embed_audio)\.|{_shared(config)}")


def _shared(config: ModelConfig) -> str:
    return unused(config, r"model\.language_model\.")
