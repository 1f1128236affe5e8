"""Tensor names that families share: those of decoders, of CLIP and SigLIP, and of towers at native resolution.

Llama, Mistral and Qwen2 share theirs; Qwen3 adds two, Qwen3-MoE experts, Gemma 3 norms. Phi-3, GLM and InternLM2 fuse
some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from checkpoints_convert.entry import Fused, Name, Shaped, Stacked
from vlkv.config import ModelConfig

# Path of our module or parameter -> its name in the checkpoint, as in `Names.ours`.
Ours = dict[str, Name | tuple[Name, ...]]
_QKV, _MLP = ("query", "key", "value"), ("gate", "up", "down")


def below(ours: str, theirs: str, names: Mapping[str, Name | tuple[Name, ...]]) -> Ours:
    """`names` with the prefix `ours` before our paths and the prefix `theirs` before the checkpoint's names."""

    def full(name: Name) -> Name:
        return theirs + name if isinstance(name, str) else replace(name, key=theirs + name.key)

    return {
        ours + path: tuple(map(full, name)) if isinstance(name, tuple) else full(name) for path, name in names.items()
    }


# From our names under `decoder.layers.*.` to the checkpoint's names under a prefix and `layers.*.`.
_LLAMA: Ours = {
    "attention_norm": "input_layernorm", "query": "self_attn.q_proj", "out": "self_attn.o_proj",
    "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "mlp_norm": "post_attention_layernorm", **{name: f"mlp.{name}_proj" for name in _MLP},
}  # fmt: skip
_QWEN3: Ours = _LLAMA | {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
# Checkpoints have a tensor for each expert, or one for all experts: [E, 2 F, D] (gates and ups) and [E, D, F] (downs),
# or with the last two axes exchanged. The converter uses the names that the checkpoint has.
_EXPERTS: Ours = {
    ours: (
        Stacked(f"#.{ours}_proj.weight"),
        *(Fused(theirs, of, axis=1, swapped=swapped) for swapped in (False, True)),
    )
    for theirs, of in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
    for ours in of
}
_QWEN3_MOE: Ours = _QWEN3 | {"experts.router": "mlp.gate"} | below("experts.", "mlp.experts.", _EXPERTS)
# Layers with the gated delta rule, and `q_proj` of the others, which has a query and an output gate for each head.
_RECURRENCE: Ours = below("recurrence.", "linear_attn.", {
    **{f"{name}.weight": Fused("in_proj_qkv.weight") for name in _QKV},
    **{f"{name}.conv": Fused("conv1d.weight") for name in _QKV},
    "out_gate": "in_proj_z", "rate": "in_proj_b", "norm": "norm", "out": "out_proj",
    "decay.weight": "in_proj_a.weight", "decay.bias": "dt_bias", "decay.log_rate": "A_log",
}) | dict.fromkeys(("query", "out_gate"), Fused("self_attn.q_proj", ("query", "out_gate"), by_head=True))  # fmt: skip
_SHARED_EXPERT: Ours = {f"experts.shared.{name}": f"mlp.shared_expert.{name}_proj" for name in _MLP}
_GEMMA3: Ours = _QWEN3 | {
    "attention_out_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}  # fmt: skip
_GEMMA4: Ours = _GEMMA3 | {
    "scale": "layer_scalar", "mix_input.gate": "per_layer_input_gate", "mix_input.projection": "per_layer_projection",
    "mix_input.norm": "post_per_layer_input_norm", "dense_out_norm": "post_feedforward_layernorm_1",
    "experts_out_norm": "post_feedforward_layernorm_2", "experts_norm": "pre_feedforward_layernorm_2",
    "experts.router": "router.proj", "experts.router_scale": "router.scale",
    "experts.share_scale": "router.per_expert_scale", "experts.down": "experts.down_proj",
    **dict.fromkeys(("experts.gate", "experts.up"), Fused("experts.gate_up_proj", ("gate", "up"), axis=1)),
}  # fmt: skip
_GATE_UP: Ours = {**dict.fromkeys(("gate", "up"), Fused("mlp.gate_up_proj", ("gate", "up")))}
_GLM: Ours = {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}
_INTERNLM2: Ours = {
    "attention_norm": "attention_norm", **dict.fromkeys(_QKV, Fused("attention.wqkv", by_head=True)),
    "out": "attention.wo", "mlp_norm": "ffn_norm", "gate": "feed_forward.w1", "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}  # fmt: skip
# `DecoderConfig.names` -> the names of a layer.
_LAYERS: dict[str, Ours] = {
    "": _LLAMA,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_5": _QWEN3 | _RECURRENCE,
    "qwen3_5_moe": _QWEN3_MOE | _RECURRENCE | _SHARED_EXPERT | {"experts.shared_gate": "mlp.shared_expert_gate"},
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "phi3": _LLAMA | dict.fromkeys(_QKV, Fused("self_attn.qkv_proj")) | _GATE_UP,
    "glm": _LLAMA | _GATE_UP | _GLM,
    "internlm2": _INTERNLM2,
}
_LAYER_INPUTS: Ours = {
    "layer_inputs.table": "embed_tokens_per_layer", "layer_inputs.projection": "per_layer_model_projection",
    "layer_inputs.norm": "per_layer_projection_norm",
}  # fmt: skip
_FURTHER_TOKENS = r"^mtp\."  # layers of Qwen3.5 that predict further tokens
# From names of transformers 4 to names of transformers 5, for models with a tower.
TRANSFORMERS_4 = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
)
VIT_RENAMES = (*TRANSFORMERS_4, (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."))
# Names of CLIP and SigLIP together. A name without a parameter in the model is ignored.
VIT: Ours = {
    "patch": "embeddings.patch_embedding.weight", "patch_bias": "embeddings.patch_embedding.bias",
    "class_token": "embeddings.class_embedding", "position": "embeddings.position_embedding",
    "first_norm": "pre_layrnorm", "last_norm": "post_layernorm",
    **below("blocks.*.", "encoder.layers.*.", {
        "attention_norm": "layer_norm1", "query": "self_attn.q_proj", "key": "self_attn.k_proj",
        "value": "self_attn.v_proj", "out": "self_attn.out_proj", "mlp_norm": "layer_norm2", "up": "mlp.fc1",
        "down": "mlp.fc2"}),
}  # fmt: skip
# Names that the towers of Qwen2-VL, Qwen3-VL and GLM share.
_NATIVE: Ours = {"vision.patch.bias": "patch_embed.proj.bias"} | below("vision.blocks.*.", "blocks.*.", {
    **dict.fromkeys(_QKV, Fused("attn.qkv")), "attention_norm": "norm1", "out": "attn.proj", "mlp_norm": "norm2",
})  # fmt: skip
NATIVE_RENAMES = (
    (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
    (r"^visual\.", "model.visual."),
)


def decoder(config: ModelConfig, prefix: str) -> Ours:
    """Path of each parameter of a decoder -> its name in the checkpoint, which starts with `prefix`."""
    kind = config.decoder.names
    top: Ours = {"embedding": "tok_embeddings" if kind == "internlm2" else "embed_tokens", "norm": "norm"}
    names = top | (_LAYER_INPUTS if kind == "gemma4" else {}) | below("layers.*.", "layers.*.", _LAYERS[kind])
    return below("decoder.", prefix, names) | {"decoder.head": "lm_head"}


def unused(config: ModelConfig, prefix: str) -> str:
    """Regular expression of tensors that a checkpoint has and the decoder does not need; it matches nothing if none.

    Gemma 4: projections of keys and values in layers that use those of earlier layers. Qwen3.5: the layers that predict
    further tokens.
    """
    if config.decoder.recurrent is not None:
        return _FURTHER_TOKENS
    shared = "|".join(str(i) for i, kind in enumerate(config.decoder.kinds) if kind.shared)
    return rf"^{prefix}layers\.(?:{shared})\.self_attn\.(?:[kv]_proj|[kv]_norm)\." if shared else r"(?!)"


def with_native_tower(config: ModelConfig, further: Ours) -> Ours:
    """The names of a decoder and of a tower at native resolution, which are below `model.visual.`.

    `further`: names of tower and projector that this family does not share with others.
    """
    c = config.vision
    patch = Shaped("patch_embed.proj.weight", (-1, 3, c.frames, c.patch_size, c.patch_size))
    visual = below("", "model.visual.", {**_NATIVE, "vision.patch.weight": patch, **further})
    return decoder(config, "model.language_model.") | visual
