"""`vlkv convert` of every registered family: both formats, from shards under the oldest names, in bfloat16."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import vlkv
from checkpoints_convert import converting
from checkpoints_convert.__main__ import convert
from checkpoints_convert.entry import HEAD, make_entries
from checkpoints_convert.sources import INDEX
from vlkv.families import FAMILIES
from vlkv.families.folders import describe

TEXT = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=40, max_position_embeddings=128)  # fmt: skip
LLAMA = {**TEXT, "model_type": "llama"}
QWEN2 = {**TEXT, "model_type": "qwen2"}
PHI3 = {**TEXT, "model_type": "phi3", "sliding_window": None}
SQUARE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28,
              patch_size=7)  # fmt: skip
CLIP, SIGLIP = {**SQUARE, "model_type": "clip_vision_model"}, {**SQUARE, "model_type": "siglip_vision_model"}
LLAVA_NEXT = {"text_config": LLAMA, "vision_config": CLIP, "image_grid_pinpoints": [[28, 56], [56, 28]]}
MROPE = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "tie_word_embeddings": True}
ORIGINAL = {**TEXT, "mm_hidden_size": 16, "mm_projector_type": "mlp2x_gelu"}
CHAT = {"model_type": "internvl_chat", "ps_version": "v2", "dynamic_image_size": True}
CHAT_TOWER = {**SQUARE, "qkv_bias": True, "qk_normalization": False, "norm_type": "layer_norm"}
CHAT_TOWER_6B = {**SQUARE, "qkv_bias": False, "qk_normalization": True, "norm_type": "rms_norm"}

# Today's names -> those that the first checkpoints have.
TRANSFORMERS_4 = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(vision_tower|multi_modal_projector|image_newline)", r"\1"),
)
LLAVA_4 = (*TRANSFORMERS_4, (r"^vision_tower\.", "vision_tower.vision_model."))
QWEN_4 = ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
LLAVA_ORIGINAL = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.vision_tower\.", "model.vision_tower.vision_tower.vision_model."),
    (r"^model\.multi_modal_projector\.linear_1\.", "model.mm_projector.0."),
    (r"^model\.multi_modal_projector\.linear_2\.", "model.mm_projector.2."),
)
MOBILEVLM = (
    *LLAVA_ORIGINAL,
    (r"^model\.mm_projector\.(\d)\.", r"model.mm_projector.mlp.mlp.\1."),
    (r"^model\.multi_modal_projector\.depthwise\.", "model.mm_projector.peg.peg.0."),
)

EXPERTS = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[])
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 10}
DELTA = dict(head_dim=8, linear_key_head_dim=6, linear_value_head_dim=5, linear_num_key_heads=2,
             linear_num_value_heads=4, layer_types=["linear_attention", "full_attention"],
             rope_parameters={"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]})  # fmt: skip
GLM = {**TEXT, "rope_parameters": {"mrope_section": [2, 1, 1], "rope_type": "default"}}
GLM_TOWER = dict(depth=2, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=16, patch_size=4,
                 image_size=12)  # fmt: skip
GEMMA4 = dict(
    model_type="gemma4_text", head_dim=8, global_head_dim=16, num_hidden_layers=4, num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=6, use_double_wide_mlp=True,
    vocab_size_per_layer_input=40, enable_moe_block=True, num_experts=3, top_k_experts=2, moe_intermediate_size=12,
)  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], tuple[tuple[str, str], ...]]] = {
    "llava": ({"model_type": "llava", "text_config": LLAMA, "vision_config": CLIP}, LLAVA_4),
    "llava_next": ({"model_type": "llava_next", **LLAVA_NEXT}, LLAVA_4),
    "llava_next_video": ({"model_type": "llava_next_video", **LLAVA_NEXT}, LLAVA_4),
    "llava_onevision": (
        {"model_type": "llava_onevision", "text_config": QWEN2, "vision_config": SIGLIP,
         "image_grid_pinpoints": [[28, 56], [56, 28]]},
        LLAVA_4,
    ),
    "llava_qwen": (
        {**ORIGINAL, "architectures": ["LlavaQwenForCausalLM"], "model_type": "llava", "vision_config": SIGLIP,
         "image_aspect_ratio": "anyres_max_2", "image_grid_pinpoints": "(1x1),...,(2x2)",
         "mm_patch_merge_type": "spatial_unpad"},
        LLAVA_ORIGINAL,
    ),
    "llava_llama": (
        {**ORIGINAL, "model_type": "llava_llama", "mm_vision_tower": "x/tower", "vision_config": CLIP},
        LLAVA_ORIGINAL,
    ),
    "mobilevlm": (
        {**ORIGINAL, "model_type": "mobilevlm", "mm_projector_type": "ldpnetv2", "mm_vision_tower": "x/tower",
         "vision_config": {**CLIP, "image_size": 84}},
        MOBILEVLM,
    ),
    "internvl": (
        {"model_type": "internvl", "text_config": QWEN2,
         "vision_config": {**SQUARE, "model_type": "internvl_vision", "attention_bias": True}},
        TRANSFORMERS_4,
    ),
    "internvl_chat": (
        {**CHAT, "llm_config": {**TEXT, "model_type": "internlm2", "bias": False}, "vision_config": CHAT_TOWER_6B,
         "template": "internlm2-chat"},
        ((r"^lm_head\.", "language_model.output."),),
    ),
    "internvl_chat with phi3": (
        {**CHAT, "llm_config": PHI3, "vision_config": CHAT_TOWER, "template": "phi3-chat"},
        ((r"^lm_head\.", "language_model.lm_head."),),
    ),
    **{kind: ({"model_type": kind, "text_config": LLAMA, "vision_config": SQUARE}, ())
       for kind in ("idefics3", "smolvlm")},
    "qwen2_vl": (
        {**MROPE, "model_type": "qwen2_vl", "vision_config": dict(
            depth=2, embed_dim=16, mlp_ratio=2, num_heads=2, hidden_size=16, patch_size=4)},
        QWEN_4,
    ),
    "qwen2_5_vl": (
        {**MROPE, "model_type": "qwen2_5_vl", "vision_config": dict(
            depth=2, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=16, patch_size=4,
            window_size=16, fullatt_block_indexes=[1])},
        QWEN_4,
    ),
    "qwen3_vl": (
        {"model_type": "qwen3_vl", "tie_word_embeddings": False,
         "text_config": {**TEXT, "model_type": "qwen3_vl_text", "head_dim": 8,
                         "rope_parameters": {"mrope_section": [2, 1, 1], "rope_type": "default"}},
         "vision_config": dict(depth=2, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=16,
                               patch_size=4, num_position_embeddings=9, deepstack_visual_indexes=[0, 1])},
        ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")),
    ),
    "qwen3_vl_moe": (
        {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
         "text_config": {**TEXT, **EXPERTS, "model_type": "qwen3_vl_moe_text", "head_dim": 8,
                         "rope_parameters": {"mrope_section": [2, 1, 1], "rope_type": "default"}},
         "vision_config": dict(depth=2, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=16,
                               patch_size=4, num_position_embeddings=9, deepstack_visual_indexes=[0, 1])},
        ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")),
    ),
    **{kind: (
        {"model_type": kind, "tie_word_embeddings": False,
         "text_config": {**TEXT, **DELTA, **more, "model_type": f"{kind}_text"},
         "vision_config": dict(depth=2, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=16,
                               patch_size=4, num_position_embeddings=9)}, ())
       for kind, more in (("qwen3_5", {}), ("qwen3_5_moe", SHARED))},
    **{kind: ({"model_type": kind, "text_config": GLM, "vision_config": GLM_TOWER}, ())
       for kind in ("glm4v", "glm46v", "glm_ocr")},
    "paddleocr_vl": (
        {**MROPE, "model_type": "paddleocr_vl", "tie_word_embeddings": False, "head_dim": 8,
         "vision_config": {**SQUARE, "model_type": "paddleocr_vl"}},
        ((r"^model\.projector\.", "mlp_AR."), *QWEN_4),
    ),
    "qwen": (
        dict(model_type="qwen", vocab_size=40, hidden_size=128, num_hidden_layers=1, num_attention_heads=2,
             kv_channels=8, intermediate_size=32, visual=dict(
                heads=2, image_size=28, layers=2, mlp_ratio=1.5, output_dim=128, patch_size=7, width=16, n_queries=4)),
        (),
    ),
    "gemma3": (
        {"model_type": "gemma3", "tie_word_embeddings": True, "mm_tokens_per_image": 4, "image_token_index": 7,
         "text_config": {**TEXT, "model_type": "gemma3_text", "head_dim": 8},
         "vision_config": dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
                               image_size=28, patch_size=7)},
        LLAVA_4,
    ),
    "gemma4": (
        {"model_type": "gemma4", "tie_word_embeddings": True, "text_config": {**TEXT, **GEMMA4},
         "vision_config": dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
                               num_key_value_heads=2, head_dim=8, patch_size=4, pooling_kernel_size=2,
                               position_embedding_size=8, standardize=True,
                               use_clipped_linears=True)},
        (),
    ),
    "eve": ({**ORIGINAL, "model_type": "eve", "mm_vision_tower": "x/eve-patch14-anypixel-672"}, ()),
    "llama": (LLAMA, ()),
    "mistral": ({**TEXT, "model_type": "mistral", "sliding_window": None}, ()),
    "qwen2": (QWEN2, ()),
    "qwen3": ({**TEXT, "model_type": "qwen3", "head_dim": 8}, ()),
    "qwen3_moe": ({**TEXT, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 8}, ()),
    "qwen3_5_text": ({**TEXT, **DELTA, "model_type": "qwen3_5_text"}, ()),
    "qwen3_5_moe_text": ({**TEXT, **DELTA, **SHARED, "model_type": "qwen3_5_moe_text"}, ()),
    "phi3": (PHI3, ()),
    "gemma3_text": ({**TEXT, "model_type": "gemma3_text", "head_dim": 8, "tie_word_embeddings": True}, ()),
    "gemma4_text": ({**TEXT, **GEMMA4, "tie_word_embeddings": True}, ()),
    "internlm2": ({**TEXT, "model_type": "internlm2", "bias": True}, ((r"^lm_head\.", "output."),)),
}  # fmt: skip


def write(folder: Path, raw: dict[str, Any], renames) -> dict[str, np.ndarray]:
    """The checkpoint in three shards; returns its tensors under today's names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": "bfloat16"}))
    if raw["model_type"] == "internvl_chat":
        (folder / "added_tokens.json").write_text(json.dumps({"<IMG_CONTEXT>": 7, "<|im_end|>": 8, "<|end|>": 9}))
    table = describe(folder)
    entries = make_entries(table.names, table.shapes())
    tied = raw.get("tie_word_embeddings", False)
    shapes = {entry.key: entry.shape for entry in entries if not (tied and entry.path == HEAD)}
    rng = np.random.default_rng(0)
    tensors = {key: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for key, shape in shapes.items()}
    old = {key: key for key in tensors}
    for pattern, replacement in renames:
        old = {key: re.sub(pattern, replacement, name) for key, name in old.items()}
    weight_map = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(old.values())}
    for file in sorted(set(weight_map.values())):
        save_file({old[key]: x for key, x in tensors.items() if weight_map[old[key]] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def bits(arrays) -> np.ndarray:
    """Of all numbers, in order of size: what no renaming, splitting or reshaping changes."""
    return np.sort(np.concatenate([np.asarray(x).reshape(-1).view(np.uint16) for x in arrays]))


def test_no_family_is_forgotten():
    assert {name.split(" ")[0] for name in CASES} == set(FAMILIES)


@pytest.mark.default("mobilevlm", "internvl_chat", "qwen2_vl", "qwen3_moe", "glm_ocr")
@pytest.mark.parametrize("name", CASES)
def test_what_was_converted_holds_the_same_bits(tmp_path, monkeypatch, name):
    raw, renames = CASES[name]
    tensors = write(tmp_path / "source", raw, renames)
    third = sum(x.nbytes for x in tensors.values()) // 3
    monkeypatch.setattr(converting, "SHARD_BYTES", third)
    monkeypatch.setattr(converting, "PIECE_BYTES", third)
    wanted = vlkv.load_params(tmp_path / "source")
    assert wanted.config.family == name.split(" ")[0]
    np.testing.assert_array_equal(bits(jax.tree.leaves(wanted)), bits(tensors.values()))
    for kind in converting.FORMATS:
        out = convert(tmp_path / "source", tmp_path / kind, format=kind, progress=False)
        converting.verify(out)
        made = vlkv.load_params(out)
        assert made.config == wanted.config
        assert jax.tree.structure(made) == jax.tree.structure(wanted)
        for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
            assert ours.dtype == theirs.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(np.asarray(ours).view(np.uint16), np.asarray(theirs).view(np.uint16))
    files = sorted((tmp_path / "safetensors").glob("model*.safetensors"))
    assert len(files) > 1 and len(list((tmp_path / "orbax").glob("params-*"))) > 1
    found: dict[str, np.ndarray] = {}
    for file in files:
        with safe_open(file, framework="np") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    assert found.keys() == tensors.keys(), "today's names"
    for key, array in tensors.items():
        np.testing.assert_array_equal(found[key].view(np.uint16), array.view(np.uint16))
