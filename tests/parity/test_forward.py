"""LLaVA and text models against transformers in float32: layer outputs and logits to 1e-4, and greedy tokens."""

from __future__ import annotations

import functools
import json
from functools import partial

import jax
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import NEW, Row, answer, check_answers, check_states, raw_of, save
from tests.models import same
from tests.parity.conftest import IMAGE_TOKEN, make_llava, make_text

SIDES = ("left", "right", "left")


def llava_rows() -> list[Row]:
    """Three rows: two images, one image, none; 44, 30 and 9 tokens."""
    rng, rows = np.random.default_rng(0), []
    for images, text in ((2, 12), (1, 14), (0, 9)):
        ids = rng.integers(3, 90, text)
        for at in range(images):
            ids = np.insert(ids, 4 + 20 * at, [IMAGE_TOKEN] * 16)
        pixels = rng.normal(size=(images, 3, 28, 28)).astype(np.float32)
        rows.append(Row(ids.tolist(), {"pixel_values": list(pixels)} if images else {}))
    return rows


def check(saved, sides=SIDES) -> vlkv.Inputs:
    model, _, params, rows = saved
    return check_states(params, rows, [answer(model, row) for row in rows], sides)[0]


@pytest.fixture(scope="module")
def loaded(llava):
    model, folder = llava
    return model, folder, vlkv.load_params(folder), llava_rows()


def test_llava_batch_of_unequal_rows(loaded):
    check(loaded)


@pytest.mark.full
def test_greedy_tokens(loaded):
    model, _, params, rows = loaded
    check_answers(params, rows, [answer(model, row, NEW) for row in rows], SIDES)


ROPE = {"rope_type": "default", "rope_theta": 500.0}


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
)
def test_llava_variants(tmp_path, changes):
    check(save(make_llava(**changes), tmp_path, llava_rows()))


# --- text models ------------------------------------------------------------------------------------------------------

WINDOW = 8
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 12}
WINDOWS = {
    "mistral": dict(sliding_window=WINDOW, num_key_value_heads=3),
    "qwen2": dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "phi3": dict(sliding_window=WINDOW),
    "gemma3_text": dict(
        num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=2, head_dim=10, query_pre_attn_scalar=30,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=5e5, rope_local_base_freq=5e3,
    ),
}  # fmt: skip
TEXT = {
    **{f"{kind}, window": (kind, changes) for kind, changes in WINDOWS.items()},
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "mistral": ("mistral", {"num_key_value_heads": 3}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3, bias": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "experts, normalised": ("qwen3_moe", MOE | {"norm_topk_prob": True}),
    "experts, sparse": ("qwen3_moe", MOE | {"norm_topk_prob": False, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "experts, mlp": (
        "qwen3_moe",
        MOE | {"mlp_only_layers": [1], "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "no experts": ("qwen3_moe", MOE | {"num_experts": 0}),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """text(name): a model of `TEXT`, and rows of which two are longer than the window and one is shorter."""
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    rows = [Row(rng.integers(3, 99, count).tolist()) for count in (20, 15, WINDOW - 2)]
    return functools.cache(lambda name: save(make_text(TEXT[name][0], **TEXT[name][1]), folder / name, rows))


@pytest.mark.default("window", "qwen3]", "experts, sparse")
@pytest.mark.parametrize("name", TEXT)
def test_text_models(text, name):
    check(text(name), "left")


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", *(name for name in TEXT if "window" in name)])
def test_greedy_tokens_of_text_models(text, name):
    model, _, params, rows = text(name)
    check_answers(params, rows, [answer(model, row, NEW) for row in rows], "left")


def test_a_method_has_nothing_to_compress_if_all_layers_have_a_window(text):
    saved = text("mistral, window")
    run = partial(vlkv.generate, policy=vlkv.policies.SnapKV(keep=0.5))
    with pytest.raises(vlkv.InputError, match="SnapKV: all layers of this model have a sliding window"):
        jax.eval_shape(run, saved.params, saved.inputs())


# --- folders ----------------------------------------------------------------------------------------------------------


def test_every_name_and_layout_on_disk_gives_the_same_parameters(loaded, tmp_path):
    """Old keys, new keys, sharded, and converted twice."""
    model, folder, params, _ = loaded
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
    raw = raw_of(source)
    rope = raw["text_config"].pop("rope_parameters")
    raw["text_config"]["rope_theta"] = rope["rope_theta"]
    (target / "config.json").write_text(json.dumps(raw))


def test_bfloat16_stays_bfloat16(loaded, tmp_path):
    folder = loaded[1]
    convert(folder, tmp_path / "half", dtype="bfloat16", progress=False)
    params = vlkv.load_params(tmp_path / "half")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(vlkv.load_params(tmp_path / "half", dtype="float32"))} == {
        "float32"
    }
