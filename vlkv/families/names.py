"""Tensor names that families share: those of decoders, of CLIP and SigLIP, and of towers at native resolution.

Llama, Mistral and Qwen2 share theirs; Qwen3 adds two, Qwen3-MoE experts, Gemma 3 norms.

Phi-3, GLM and InternLM2 fuse some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from checkpoints_convert.entry import Fused, Name, Shaped, Stacked
from vlkv.config import ModelConfig

Ours = dict[str, Name | tuple[Name, ...]]
# From our names under `decoder.` to the checkpoint's names under a prefix.
_LLAMA: Ours = {
    "embedding": "embed_tokens", "norm": "norm",
    "layers.*.attention_norm": "layers.*.input_layernorm", "layers.*.query": "layers.*.self_attn.q_proj",
    "layers.*.key": "layers.*.self_attn.k_proj", "layers.*.value": "layers.*.self_attn.v_proj",
    "layers.*.out": "layers.*.self_attn.o_proj", "layers.*.mlp_norm": "layers.*.post_attention_layernorm",
    "layers.*.gate": "layers.*.mlp.gate_proj", "layers.*.up": "layers.*.mlp.up_proj",
    "layers.*.down": "layers.*.mlp.down_proj",
}  # fmt: skip
_QWEN3: Ours = _LLAMA | {
    "layers.*.query_norm": "layers.*.self_attn.q_norm", "layers.*.key_norm": "layers.*.self_attn.k_norm",
}  # fmt: skip
# Either each expert's tensors, or one of all experts: [E, 2 F, D] and [E, D, F], or with the last two axes exchanged.
_EXPERTS = "layers.*.mlp.experts."
_QWEN3_MOE = _QWEN3 | {
    "layers.*.experts.router": "layers.*.mlp.gate",
    **{f"layers.*.experts.{ours}": (
        Stacked(f"{_EXPERTS}#.{ours}_proj.weight"),
        *(Fused(f"{_EXPERTS}{theirs}", of, axis=1, swapped=swapped) for swapped in (False, True)))
       for theirs, of in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))) for ours in of},
}  # fmt: skip
_DELTA = "layers.*.linear_attn."
_HEADS = {"weight": Fused(f"{_DELTA}in_proj_qkv.weight"), "conv": Fused(f"{_DELTA}conv1d.weight")}
_RECURRENCE: Ours = {
    **{f"layers.*.recurrence.{name}.{part}": fused for name in ("query", "key", "value")
       for part, fused in _HEADS.items()},
    **{f"layers.*.recurrence.{ours}": _DELTA + theirs for ours, theirs in (
        ("out_gate", "in_proj_z"), ("rate", "in_proj_b"), ("norm", "norm"), ("out", "out_proj"),
        ("decay.weight", "in_proj_a.weight"), ("decay.bias", "dt_bias"), ("decay.log_rate", "A_log"))},
    **{f"layers.*.{name}": Fused("layers.*.self_attn.q_proj", ("query", "out_gate"), by_head=True)
       for name in ("query", "out_gate")},
}  # fmt: skip
_SHARED: Ours = {
    **{f"layers.*.experts.shared.{name}": f"layers.*.mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "layers.*.experts.shared_gate": "layers.*.mlp.shared_expert_gate",
}
_GEMMA3 = _QWEN3 | {
    "layers.*.attention_out_norm": "layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "layers.*.pre_feedforward_layernorm",
    "layers.*.mlp_out_norm": "layers.*.post_feedforward_layernorm",
}
_GEMMA4 = _GEMMA3 | {
    "layer_inputs.table": "embed_tokens_per_layer", "layer_inputs.projection": "per_layer_model_projection",
    "layer_inputs.norm": "per_layer_projection_norm", "layers.*.scale": "layers.*.layer_scalar",
    "layers.*.mix_input.gate": "layers.*.per_layer_input_gate",
    "layers.*.mix_input.projection": "layers.*.per_layer_projection",
    "layers.*.mix_input.norm": "layers.*.post_per_layer_input_norm",
    "layers.*.dense_out_norm": "layers.*.post_feedforward_layernorm_1",
    "layers.*.experts_out_norm": "layers.*.post_feedforward_layernorm_2",
    "layers.*.experts_norm": "layers.*.pre_feedforward_layernorm_2",
    "layers.*.experts.router": "layers.*.router.proj", "layers.*.experts.router_scale": "layers.*.router.scale",
    "layers.*.experts.share_scale": "layers.*.router.per_expert_scale",
    **{f"layers.*.experts.{name}": Fused("layers.*.experts.gate_up_proj", ("gate", "up"), axis=1)
       for name in ("gate", "up")},
    "layers.*.experts.down": "layers.*.experts.down_proj",
}  # fmt: skip
_PHI3 = _LLAMA | {
    **{f"layers.*.{name}": Fused("layers.*.self_attn.qkv_proj") for name in ("query", "key", "value")},
    **{f"layers.*.{name}": Fused("layers.*.mlp.gate_up_proj", ("gate", "up")) for name in ("gate", "up")},
}
_GLM = _LLAMA | {
    "layers.*.attention_out_norm": "layers.*.post_self_attn_layernorm",
    "layers.*.mlp_out_norm": "layers.*.post_mlp_layernorm",
    **{f"layers.*.{name}": Fused("layers.*.mlp.gate_up_proj", ("gate", "up")) for name in ("gate", "up")},
}
_INTERNLM2: Ours = {
    "embedding": "tok_embeddings", "norm": "norm", "layers.*.attention_norm": "layers.*.attention_norm",
    **{f"layers.*.{name}": Fused("layers.*.attention.wqkv", by_head=True) for name in ("query", "key", "value")},
    "layers.*.out": "layers.*.attention.wo", "layers.*.mlp_norm": "layers.*.ffn_norm",
    "layers.*.gate": "layers.*.feed_forward.w1", "layers.*.up": "layers.*.feed_forward.w3",
    "layers.*.down": "layers.*.feed_forward.w2",
}  # fmt: skip
_KINDS = {
    "": _LLAMA,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_5": _QWEN3 | _RECURRENCE,
    "qwen3_5_moe": _QWEN3_MOE | _RECURRENCE | _SHARED,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "phi3": _PHI3,
    "glm": _GLM,
    "internlm2": _INTERNLM2,
}
_FURTHER_TOKENS = r"^mtp\."  # layers of Qwen3.5
# From names of transformers 4 to names of transformers 5, for models with a tower.
TRANSFORMERS_4 = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
)
VIT_RENAMES = (*TRANSFORMERS_4, (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."))
# Names of CLIP and SigLIP, which have different parts of them.
VIT: dict[str, Name] = {
    "patch": "embeddings.patch_embedding.weight", "patch_bias": "embeddings.patch_embedding.bias",
    "class_token": "embeddings.class_embedding", "position": "embeddings.position_embedding",
    "first_norm": "pre_layrnorm", "last_norm": "post_layernorm",
    "blocks.*.attention_norm": "encoder.layers.*.layer_norm1", "blocks.*.mlp_norm": "encoder.layers.*.layer_norm2",
    **{f"blocks.*.{ours}": f"encoder.layers.*.self_attn.{theirs}_proj"
       for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out"))},
    "blocks.*.up": "encoder.layers.*.mlp.fc1", "blocks.*.down": "encoder.layers.*.mlp.fc2",
}  # fmt: skip
# Names that the towers of Qwen2-VL, Qwen3-VL and GLM share.
_NATIVE: dict[str, Name] = {
    "vision.patch.bias": "patch_embed.proj.bias",
    "vision.blocks.*.attention_norm": "blocks.*.norm1", "vision.blocks.*.out": "blocks.*.attn.proj",
    **{f"vision.blocks.*.{name}": Fused("blocks.*.attn.qkv") for name in ("query", "key", "value")},
    "vision.blocks.*.mlp_norm": "blocks.*.norm2",
}  # fmt: skip
NATIVE_RENAMES = (
    (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
    (r"^visual\.", "model.visual."),
)


def decoder(config: ModelConfig, prefix: str) -> Ours:
    """Path of each parameter of a decoder -> its name in the checkpoint, which starts with `prefix`."""
    return below("decoder.", prefix, _KINDS[config.decoder.names]) | {"decoder.head": "lm_head"}


def below(ours: str, theirs: str, names: Mapping[str, Name | tuple[Name, ...]]) -> Ours:
    """`names` with the prefix `ours` before our paths and the prefix `theirs` before the checkpoint's names."""

    def one(name: Name) -> Name:
        return theirs + name if isinstance(name, str) else replace(name, key=theirs + name.key)

    return {
        ours + path: tuple(map(one, name)) if isinstance(name, tuple) else one(name) for path, name in names.items()
    }


def unused(config: ModelConfig, prefix: str) -> str:
    """Regular expression of the tensors that a checkpoint has for layers that use the keys of earlier ones.

    Or, in a family without such layers, for layers that predict further tokens.
    """
    if config.decoder.recurrent is not None:
        return _FURTHER_TOKENS
    shared = "|".join(str(i) for i, kind in enumerate(config.decoder.kinds) if kind.shared)
    return rf"^{prefix}layers\.(?:{shared})\.self_attn\.(?:[kv]_proj|[kv]_norm)\." if shared else r"(?!)"


def with_native_tower(config: ModelConfig, own: Mapping[str, Name]) -> Ours:
    """The names of the decoder and of a tower with the further names `own`, which are those below `model.visual.`."""
    c = config.vision
    patch = Shaped("patch_embed.proj.weight", (-1, 3, c.frames, c.patch_size, c.patch_size))
    visual = below("", "model.visual.", {**_NATIVE, "vision.patch.weight": patch, **own})
    return decoder(config, "model.language_model.") | visual
