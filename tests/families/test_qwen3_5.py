"""Qwen3.5, dense and with experts, against transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from tests.families.common import (
    ParityTests,
    Row,
    answer,
    check_files,
    check_refused,
    check_states,
    extend,
    forward,
    joined,
    prefill,
    raw_of,
    read,
    save,
    whole,
)
from tests.families.common_qwen import DELTA, EXPERTS, make, make_rows, remember_longer
from tests.models import same
from tests.parity.conftest import perturb, transformers
from vlkv import policies
from vlkv.families import config_from_hf

KINDS = {"qwen3_5": "dense", "qwen3_5_moe": "experts"}
# As in common_qwen, with more than a chunk of tokens in two rows.
ROWS = (
    (4, ("image", 1, 4, 6), 70, ("image", 1, 6, 2), 5),
    (2, ("image", 1, 6, 10), 1, ("video", 2, 4, 4), 6),
    (3, ("image", 1, 4, 8), 61),
    (12,),
)


@pytest.fixture(scope="module", params=KINDS, ids=KINDS.get)
def saved(request, tmp_path_factory):
    """Rows with two images, an image and a video, one image, and none; no number of tokens is a multiple of a chunk."""
    return save(make(request.param), tmp_path_factory.mktemp(request.param), make_rows(ROWS, apart=True))


class TestParity(ParityTests):
    new = 64
    within = 2e-4  # float64 differs by 5e-5 from both sides even without experts; it depends on the processor


@pytest.mark.full
def test_no_picture_at_all(saved):
    model, _, params, _ = saved
    rows = make_rows(((5,), (64,), (131,)))
    inputs = check_states(params, rows, [answer(model, row) for row in rows])
    np.testing.assert_allclose(forward(params, inputs), read(params, inputs)[1], atol=1e-5)


@pytest.mark.full
def test_three_turns_are_the_whole_conversation(saved):
    """The first two have an image."""
    model, _, params, _ = saved
    turns = make_rows(((4, ("image", 1, 4, 6), 3), (17, ("image", 1, 6, 2), 11), (64,)))
    wanted = answer(model, whole(*turns))[1]
    first, *later = (vlkv.Inputs.from_hf(joined([row]), params.config) for row in turns)
    cache, logits = prefill(params, first, policies.Full(), new_tokens=120)
    ends = np.cumsum([len(row.ids) for row in turns]) - 1
    np.testing.assert_allclose(logits[0], wanted[ends[0]], atol=1e-4)
    for part, end in zip(later, ends[1:], strict=True):
        cache, logits = extend(params, cache, part)
        np.testing.assert_allclose(logits[0], wanted[end], atol=1e-4)


@pytest.mark.default("dense")
def test_every_name_on_disk_gives_the_same_parameters(saved, tmp_path):
    """Shards, a converted folder, and a folder with layers that predict further tokens, which are not used."""
    folder = saved[1]
    (tmp_path / "further").mkdir()
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": np.zeros((2, 2), np.float32)}, tmp_path / "further" / "model.safetensors")
    (tmp_path / "further" / "config.json").write_text((folder / "config.json").read_text())
    check_files(saved, tmp_path, "further")


@pytest.mark.default("dense")
@pytest.mark.parametrize("kind", KINDS, ids=KINDS.get)
def test_a_text_model(kind, tmp_path):
    """Its positions have one axis. Prompts of several chunks, padded on the left."""
    text = dict(vocab_size=120, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, eos_token_id=2) | DELTA
    config, cls = {
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    }[kind]
    model = cls(config(**text, **(EXPERTS if kind == "qwen3_5_moe" else dict(intermediate_size=80)))).eval()
    perturb(model, 0)
    remember_longer(model)
    _, _, params, rows = save(model, tmp_path, make_rows(((150,), (64,), (7,))))
    named = load_file(tmp_path / "model.safetensors")  # as transformers 5.2 names them
    save_file({key.replace("model.", "model.language_model."): x for key, x in named.items()},
              tmp_path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    same(params, vlkv.load_params(tmp_path))
    inputs = check_states(params, [Row(row.ids) for row in rows], [answer(model, Row(row.ids)) for row in rows], "left")
    assert inputs.positions.shape[2] == 1


@pytest.mark.default("dense")
def test_the_head_is_tied_only_by_the_outer_config(saved):
    raw = raw_of(saved[1])
    raw["text_config"]["tie_word_embeddings"] = True
    assert not config_from_hf(raw).decoder.tied
    assert config_from_hf(raw | {"tie_word_embeddings": True}).decoder.tied


@pytest.mark.default("dense")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 5}, "layer_types has no full_attention"),
        ({"layer_types": ["full_attention"] * 4}, "must be a list of 5 layers"),
        ({"layer_types": ["sliding_attention"] * 5}, "each linear_attention or full_attention"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0"),
        ({"linear_num_key_heads": 4}, "linear_num_key_heads=4 must divide linear_num_value_heads=6"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 must be at least 2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim=0"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"model_type": "qwen3_vl_text"}, "text_config.model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25, "mrope_section": [2, 2, 2]}}, "half of 8 channels"),
        ({"vision": {"deepstack_visual_indexes": [1]}}, "deepstack_visual_indexes"),
        ({"vision": {"out_hidden_size": 64}}, "64 channels"),
    ],
    ids=str,
)
def test_a_config_that_is_not_honoured(saved, change, message):
    check_refused(raw_of(saved[1]), change, message)


@pytest.mark.default("dense")
def test_layers_with_full_attention_are_every_fourth_by_default(saved):
    raw = raw_of(saved[1])
    raw["text_config"] |= {"layer_types": None, "num_hidden_layers": 9}
    decoder = config_from_hf(raw).decoder
    assert decoder.recurrent.layers == (0, 1, 2, 4, 5, 6, 8) and decoder.full_layers == 2
    assert [kind.number for kind in decoder.kinds] == [0, 1, 2, 0, 3, 4, 5, 1, 6]
