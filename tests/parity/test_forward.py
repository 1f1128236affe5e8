"""vlkv.forward against transformers, float32: 1e-4 on logits whose standard deviation is at least 1."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests import programs
from tests.families.common import read
from tests.models import same
from tests.parity.conftest import IMAGE_TOKEN, make_llava, make_text, torch

ROPE = {"rope_type": "default", "rope_theta": 500.0}


def prompts(padding: str, seed: int = 0):
    """Three rows: two images, one image, none; 44, 30 and 9 tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for images, text in ((2, 12), (1, 14), (0, 9)):
        ids = rng.integers(3, 90, text)
        for at in range(images):
            ids = np.insert(ids, 4 + 20 * at, [IMAGE_TOKEN] * 16)
        rows.append(ids)
    longest = max(map(len, rows))
    pads = [(longest - len(ids), 0) if padding == "left" else (0, longest - len(ids)) for ids in rows]
    ids = np.stack([np.pad(ids, pad) for ids, pad in zip(rows, pads, strict=True)])
    mask = np.stack([np.pad(np.ones(len(ids), int), pad) for ids, pad in zip(rows, pads, strict=True)])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": rng.normal(size=(3, 3, 28, 28)).astype(np.float32),
    }


def reference(model, batch) -> np.ndarray:
    """Row by row without padding, the only case in which nobody's masks can be wrong."""
    out = np.zeros((*batch["input_ids"].shape, model.config.get_text_config().vocab_size), np.float32)
    used = 0
    for i, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].astype(bool), strict=True)):
        images = int((ids[mask] == IMAGE_TOKEN).sum()) // 16 if "pixel_values" in batch else 0
        extra = {"pixel_values": torch.tensor(batch["pixel_values"][used : used + images])} if images else {}
        used += images
        with torch.no_grad():
            out[i, mask] = model(input_ids=torch.tensor(ids[mask][None]), **extra).logits[0].numpy()
    return out


def check(model, folder, batch) -> None:
    params = vlkv.load_params(folder)
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    ours = np.asarray(programs.forward(params, inputs))[:, : batch["input_ids"].shape[1]]
    theirs, mask = reference(model, batch), batch["attention_mask"].astype(bool)
    assert theirs[mask].std() >= 1
    np.testing.assert_allclose(ours[mask], theirs[mask], atol=1e-4)


@pytest.mark.default("left")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_llava_batch_of_unequal_rows(llava, padding):
    check(*llava, prompts(padding))


@pytest.mark.default("mqa")
@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 6, "tied": True},
        {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True, "rope_parameters": ROPE},
        {"vision_feature_layer": -1},
        {"vision_feature_layer": 1},
    ],
    ids=["mha-tied", "mqa-bias-theta", "last-layer", "first-layer"],
)  # fmt: skip
def test_llava_variants(tmp_path, changes):
    model = make_llava(**changes)
    model.save_pretrained(tmp_path)
    check(model, tmp_path, prompts("right"))


MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 12}


@pytest.mark.default("qwen2", "mistral", "qwen3-changes4", "qwen3_moe-changes7")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("mistral", {"num_key_value_heads": 3}),
        ("qwen3", {"head_dim": 20}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen3_moe", MOE | {"norm_topk_prob": True}),
        ("qwen3_moe", MOE | {"norm_topk_prob": False, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
        ("qwen3_moe", MOE | {"mlp_only_layers": [1], "num_experts_per_tok": 1, "tie_word_embeddings": True}),
        ("qwen3_moe", MOE | {"num_experts": 0}),
    ],
)
def test_text_models(tmp_path, kind, changes):
    model = make_text(kind, **changes)
    model.save_pretrained(tmp_path)
    batch = prompts("left")
    del batch["pixel_values"]
    batch["input_ids"] = np.where(batch["input_ids"] == IMAGE_TOKEN, 7, batch["input_ids"])
    check(model, tmp_path, batch)


def test_layer_outputs_agree(llava):
    """Logits can agree by luck of a saturated head; hidden states of every layer cannot."""
    model, folder = llava
    batch = prompts("right")
    params = vlkv.load_params(folder)
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    ours, _ = read(params, inputs)
    with torch.no_grad():
        theirs = model(
            input_ids=torch.tensor(batch["input_ids"][:1]), pixel_values=torch.tensor(batch["pixel_values"][:2]),
            output_hidden_states=True,
        ).hidden_states  # fmt: skip
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):  # transformers' last one is after the norm
        np.testing.assert_allclose(np.asarray(a)[0, : b.shape[1]], b[0].numpy(), atol=1e-4)


def test_every_name_and_layout_on_disk_gives_the_same_parameters(llava, tmp_path):
    """Old keys, new keys, sharded, and converted twice."""
    model, folder = llava
    params = vlkv.load_params(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    rename_to_oldest(folder, tmp_path / "oldest")
    convert(folder, tmp_path / "converted", progress=False)
    for other in ("sharded", "new", "oldest", "converted"):
        same(params, vlkv.load_params(tmp_path / other))


def rename_to_oldest(source, target) -> None:
    """The names of transformers 4: a `vision_model` level, and buffers that nobody needs."""
    from safetensors.numpy import load_file, save_file

    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    old = {key.replace("vision_tower.", "vision_tower.vision_model.", 1): value for key, value in tensors.items()}
    old["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    old["vision_tower.vision_model.embeddings.position_ids"] = np.arange(17)[None]
    save_file(old, target / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    rope = raw["text_config"].pop("rope_parameters")
    raw["text_config"]["rope_theta"] = rope["rope_theta"]
    (target / "config.json").write_text(json.dumps(raw))


def test_bfloat16_stays_bfloat16(llava, tmp_path):
    _, folder = llava
    convert(folder, tmp_path / "half", dtype="bfloat16", progress=False)
    params = vlkv.load_params(tmp_path / "half")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(vlkv.load_params(tmp_path / "half", dtype="float32"))} == {
        "float32"
    }
