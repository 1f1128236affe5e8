"""Qwen3.5, dense and with experts, against transformers in float32."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import read
from tests.families.common_qwen import (
    BUCKETS,
    DELTA,
    EXPERTS,
    for_model,
    make,
    one_row,
    perturb,
    prompts,
    remember_longer,
    torch,
    transformers,
)
from tests.models import same
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
NEW = 64
prefill = jax.jit(vlkv.prefill, static_argnames="new_tokens")
extend = jax.jit(vlkv.extend)


@pytest.fixture(scope="module", params=KINDS, ids=KINDS.get)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param)
    model.save_pretrained(folder)
    return model, folder, vlkv.load_params(folder)


def check(saved, batch, rows) -> None:
    model, _, params = saved
    inputs = vlkv.Inputs.from_hf(batch, params.config, BUCKETS)
    states, logits = read(params, inputs)
    np.testing.assert_allclose(jax.jit(vlkv.forward)(params, inputs), logits, atol=1e-5)
    for row in range(len(rows)):
        with torch.no_grad():
            out = model(**for_model("qwen3_5", one_row(batch, row, rows)), output_hidden_states=True)
        own = np.flatnonzero(batch["attention_mask"][row])
        # The last of transformers' hidden states is after the norm.
        for ours, theirs in zip([*states[:-1], logits], [*out.hidden_states[:-1], out.logits], strict=True):
            np.testing.assert_allclose(np.asarray(ours)[row, own], theirs[0].numpy(), atol=1e-4)
        assert out.logits.std() >= 1


@pytest.mark.default("experts-right")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_layers_and_logits_of_a_batch(saved, padding):
    """Two images, an image and a video, one image, none; the numbers of tokens are no multiples of a chunk."""
    check(saved, prompts(padding, ROWS, apart=True), ROWS)


@pytest.mark.full
def test_no_picture_at_all(saved):
    rows = ((5,), (64,), (131,))
    check(saved, prompts(rows=rows), rows)


def greedy(model, arguments, new: int):
    ids = arguments["input_ids"]
    tokens = model.generate(**arguments, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                            eos_token_id=None)  # fmt: skip
    return tokens[0, ids.shape[1] :].numpy()


@pytest.mark.full
def test_greedy_tokens(saved):
    model, _, params = saved
    batch = prompts("left", ROWS, apart=True)
    inputs = vlkv.Inputs.from_hf(batch, params.config, BUCKETS)
    output = jax.jit(vlkv.generate)(params, inputs, sampling=vlkv.Greedy(max_new_tokens=NEW, stop=()))
    for row in range(len(ROWS)):
        wanted = greedy(model, for_model("qwen3_5", one_row(batch, row, ROWS)), NEW)
        np.testing.assert_array_equal(output.tokens[row], wanted)
        assert len(np.unique(wanted)) > 10


@pytest.fixture
def turns(saved):
    """A prompt with two images, in three turns of which the second has an image too; and the whole conversation."""
    rows = ((4, ("image", 1, 4, 6), 20, ("image", 1, 6, 2), 75),)
    whole = prompts(rows=rows)
    cuts = {"input_ids": [15, 48], "pixel_values": [24, 36], "image_grid_thw": [1, 2]}
    pieces = {name: np.split(whole[name], at, axis=name == "input_ids") for name, at in cuts.items()}
    parts = [{name: piece[turn] for name, piece in pieces.items() if len(piece[turn])} for turn in range(3)]
    return rows, whole, [vlkv.Inputs.from_hf(part, saved[2].config, BUCKETS) for part in parts]


@pytest.mark.full
def test_three_turns_are_the_whole_conversation(saved, turns):
    model, _, params = saved
    rows, whole, parts = turns
    with torch.no_grad():
        wanted = model(**for_model("qwen3_5", one_row(whole, 0, rows))).logits[0].numpy()
    cache, logits = prefill(params, parts[0], policies.Full(), new_tokens=120)
    ends = np.cumsum([part.lengths[0] for part in parts]) - 1
    np.testing.assert_allclose(logits[0], wanted[ends[0]], atol=1e-4)
    for part, end in zip(parts[1:], ends[1:], strict=True):
        cache, logits = extend(params, cache, part)
        np.testing.assert_allclose(logits[0], wanted[end], atol=1e-4)
    assert ends[-1] + 1 == whole["input_ids"].shape[1] > 64


@pytest.mark.default("dense")
def test_every_name_on_disk_gives_the_same_parameters(saved, tmp_path):
    """Shards, a converted folder, and a folder with layers that predict further tokens, which are not used."""
    model, folder, params = saved
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    convert(folder, tmp_path / "converted", progress=False)
    (tmp_path / "further").mkdir()
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": np.zeros((2, 2), np.float32)}, tmp_path / "further" / "model.safetensors")
    (tmp_path / "further" / "config.json").write_text((folder / "config.json").read_text())
    for other in ("sharded", "converted", "further"):
        same(params, vlkv.load_params(tmp_path / other))


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
    model.save_pretrained(tmp_path)
    params = vlkv.load_params(tmp_path)
    named = load_file(tmp_path / "model.safetensors")  # as transformers 5.2 names them
    save_file({key.replace("model.", "model.language_model."): x for key, x in named.items()},
              tmp_path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    same(params, vlkv.load_params(tmp_path))
    batch = prompts("left", ((150,), (64,), (7,)))
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    assert inputs.positions.shape[2] == 1
    logits = jax.jit(vlkv.forward)(params, inputs)
    for row, mask in enumerate(batch["attention_mask"].astype(bool)):
        with torch.no_grad():
            wanted = model(torch.tensor(batch["input_ids"][row][mask][None])).logits[0].numpy()
        np.testing.assert_allclose(np.asarray(logits)[row][inputs.valid[row]], wanted, atol=1e-4)


@pytest.mark.default("dense")
def test_the_head_is_tied_only_by_the_outer_config(saved):
    raw = json.loads((saved[1] / "config.json").read_text())
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
    raw = json.loads((saved[1] / "config.json").read_text())
    raw["vision_config"] |= change.get("vision", {})
    raw["text_config"] |= {key: value for key, value in change.items() if key != "vision"}
    with pytest.raises(vlkv.InputError, match=message) as error:
        config_from_hf(raw)
    assert len(str(error.value)) <= 200


@pytest.mark.default("dense")
def test_layers_with_full_attention_are_every_fourth_by_default(saved):
    raw = json.loads((saved[1] / "config.json").read_text())
    raw["text_config"] |= {"layer_types": None, "num_hidden_layers": 9}
    decoder = config_from_hf(raw).decoder
    assert decoder.recurrent.layers == (0, 1, 2, 4, 5, 6, 8) and decoder.full_layers == 2
    assert [kind.number for kind in decoder.kinds] == [0, 1, 2, 0, 3, 4, 5, 1, 6]
