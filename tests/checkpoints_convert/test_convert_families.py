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
from tests.families import tiny
from vlkv.families import FAMILIES
from vlkv.families.folders import describe

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

DECODER, MOE = tiny.DECODER, tiny.EXPERTS | dict(mlp_only_layers=[])
TEXT = {
    "llama": {}, "mistral": dict(sliding_window=None), "qwen2": {}, "qwen3": dict(head_dim=8),
    "phi3": dict(sliding_window=None), "internlm2": dict(bias=True), "qwen3_moe": dict(head_dim=8) | MOE,
    "gemma3_text": tiny.RAW["gemma3"]["text_config"] | dict(tie_word_embeddings=True),
    "gemma4_text": tiny.RAW["gemma4"]["text_config"] | MOE | dict(
        tie_word_embeddings=True, use_double_wide_mlp=True, enable_moe_block=True, top_k_experts=2),
    **{f"{kind}_text": tiny.RAW[kind]["text_config"] for kind in ("qwen3_5", "qwen3_5_moe")},
}  # fmt: skip
RENAMES = {
    **dict.fromkeys(("llava", "llava_next", "llava_next_video", "llava_onevision", "gemma3"), LLAVA_4),
    **dict.fromkeys(("llava_qwen", "llava_llama"), LLAVA_ORIGINAL),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QWEN_4),
    "mobilevlm": MOBILEVLM, "internvl": TRANSFORMERS_4, "internvl_chat": ((r"^lm_head\.", "language_model.output."),),
    "internlm2": ((r"^lm_head\.", "output."),), "paddleocr_vl": ((r"^model\.projector\.", "mlp_AR."), *QWEN_4),
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], tuple[tuple[str, str], ...]]] = {
    name: ((tiny.RAW.get(name) or DECODER | TEXT[name]) | {"model_type": name}, RENAMES.get(name, ()))
    for name in FAMILIES
}
CHAT = CASES["internvl_chat"][0]
CHAT["vision_config"] = tiny.INTERN | dict(qkv_bias=False, qk_normalization=True, norm_type="rms_norm")
CASES["internvl_chat with phi3"] = (
    CHAT | dict(llm_config=DECODER | TEXT["phi3"] | dict(model_type="phi3"), template="phi3-chat",
                added_tokens={"<IMG_CONTEXT>": 7, "<|end|>": 9},
                vision_config=tiny.INTERN | dict(qkv_bias=True, qk_normalization=False, norm_type="layer_norm")),
    ((r"^lm_head\.", "language_model.lm_head."),),
)  # fmt: skip


def write(folder: Path, raw: dict[str, Any], renames) -> dict[str, np.ndarray]:
    """The checkpoint in three shards; returns its tensors under today's names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": "bfloat16"}))
    (folder / "added_tokens.json").write_text(json.dumps(raw.get("added_tokens", {})))
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
