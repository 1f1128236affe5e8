"""Qwen3-VL with experts against transformers in float32, and every layout of the experts' tensors on disk."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from checkpoints_convert.__main__ import convert
from tests import reference
from tests.families.common_qwen import BUCKETS, ROWS, for_model, make, one_row, prompts, torch
from tests.families.test_qwen3_vl import ROPE, check, prefill
from tests.generation.test_decode import kept_entries
from vlkv import policies
from vlkv.families import config_from_hf

KIND = "qwen3_vl_moe"
FEW = ((3,), (2,))  # tokens of two prompts, fewer than the experts


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp(KIND)
    model = make(KIND)
    model.save_pretrained(folder)
    return model, folder, vlkv.load_params(folder)


def check_no_ties(model, batch, rows) -> None:
    """Asserts that the router's choice does not depend on rounding."""
    seen = []
    routers = [layer.mlp.gate for layer in model.model.language_model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(lambda _, __, out: seen.append(out[0])) for router in routers]
    for row in range(len(rows)):
        with torch.no_grad():
            model(**for_model(KIND, one_row(batch, row, rows)))
    for hook in hooks:
        hook.remove()
    best = torch.cat(seen).sort(descending=True).values
    active = model.config.text_config.num_experts_per_tok
    assert len(seen) == 3 * len(rows) and (best[:, active - 1] - best[:, active]).min() > 1e-4


@pytest.mark.default("left")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_layers_and_logits_of_a_batch(saved, padding):
    """Two images, an image and a video, one image, none; the second layer has an ordinary MLP."""
    batch = prompts(padding, apart=True)
    check_no_ties(saved[0], batch, ROWS)
    check(saved, batch, ROWS)


@pytest.mark.full
def test_experts_without_a_token(tmp_path):
    """Five tokens reach at most ten of sixteen experts."""
    model = make(KIND, num_experts=16)
    model.save_pretrained(tmp_path)
    check((model, tmp_path, vlkv.load_params(tmp_path)), prompts(rows=FEW), FEW)


@pytest.mark.full
def test_several_videos_in_a_prompt(saved):
    rows = ((4, ("video", 3, 4, 4), 2, ("video", 2, 6, 2), 5, ("image", 1, 4, 6), 2), (7,))
    check(saved, prompts("left", rows, apart=True), rows)


@pytest.mark.full
def test_greedy_tokens(saved):
    model, _, params = saved
    batch = prompts("left", apart=True)
    inputs = vlkv.Inputs.from_hf(batch, params.config, BUCKETS)
    output = jax.jit(vlkv.generate)(params, inputs, sampling=vlkv.Greedy(max_new_tokens=32, stop=()))
    for row in range(len(ROWS)):
        arguments = for_model(KIND, one_row(batch, row))
        ids = arguments["input_ids"]
        tokens = model.generate(**arguments, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False,
                                eos_token_id=None)  # fmt: skip
        np.testing.assert_array_equal(output.tokens[row], tokens[0, ids.shape[1] :].numpy())


@pytest.mark.full
@pytest.mark.parametrize("name", ["SnapKV", "LightKV"])
def test_decoding_from_what_is_kept(saved, name):
    """Float64 numpy. LightKV merges tokens, so here only its run is checked."""
    _, _, params = saved
    inputs = vlkv.Inputs.from_hf(prompts("left", apart=True), params.config, BUCKETS)
    policy = policies.SnapKV(keep=0.4, window=4) if name == "SnapKV" else policies.LightKV(
        layers=(1,), windows=(1,), rho=0.5)  # fmt: skip
    forced = np.random.default_rng(3).integers(6, 90, (len(ROWS), 3))
    cache, logits = prefill(params, inputs, policy, new_tokens=3)
    kept = [kept_entries(cache, inputs, row) for row in range(len(ROWS))]
    ours, step = [logits], jax.jit(vlkv.decode_step)
    for token in forced.T:
        cache, logits = step(params, cache, token)
        ours.append(logits)
    assert np.isfinite(ours).all() and not kept[0].all()
    if name == "LightKV":
        return
    embedded = jax.tree.map(np.asarray, jax.jit(lambda params, inputs: params.embed(inputs))(params, inputs))
    for row in range(len(ROWS)):
        valid = inputs.valid[row]
        positions = inputs.positions[row][valid]
        first, layers = reference.prefill(
            params.decoder, embedded.x[row, valid], positions, added=embedded.added[row][:, valid]
        )
        later = reference.decode(params.decoder, layers, kept[row], forced[row], first=positions.max() + 1)
        np.testing.assert_allclose(np.stack(ours)[:, row], np.concatenate([first[None], later]), atol=1e-4)


def rewrite(source, target, change) -> None:
    """A copy of a folder in which `change` replaces the tensors of the experts."""
    target.mkdir()
    shutil.copyfile(source / "config.json", target / "config.json")
    made: dict[str, np.ndarray] = {}
    for key, x in load_file(source / "model.safetensors").items():
        made |= change(key, x) if ".experts." in key else {key: x}
    save_file(made, target / "model.safetensors")


def exchanged(key, x):
    """A tensor of all experts with its last two axes exchanged, as published: [E, D, 2 F] or [E, F, D]."""
    return {key: np.ascontiguousarray(x.swapaxes(1, 2))}


def apart(key, x):
    """The tensors of each expert, as in folders of Qwen3-MoE, from one tensor of all experts."""
    start, _, name = key.rpartition(".")
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
    return {f"{start}.{i}.{name}.weight": np.ascontiguousarray(part) for i, expert in enumerate(x)
            for name, part in zip(names, np.split(expert, len(names)), strict=True)}  # fmt: skip


def test_every_layout_on_disk_gives_the_same_parameters(saved, tmp_path):
    _, folder, params = saved
    rewrite(folder, tmp_path / "exchanged", exchanged)
    rewrite(folder, tmp_path / "apart", apart)
    for source in ("exchanged", "apart"):
        convert(tmp_path / source, tmp_path / f"{source} converted", progress=False)
    convert(tmp_path / "apart", tmp_path / "orbax", format="orbax", progress=False)
    for other in ("exchanged", "exchanged converted", "apart", "apart converted", "orbax"):
        made = vlkv.load_params(tmp_path / other)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(made), strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_expert_that_is_missing_is_named(saved, tmp_path):
    rewrite(saved[1], tmp_path / "apart", lambda key, x: {
        name: part for name, part in apart(key, x).items() if "layers.2.mlp.experts.4.up" not in name})  # fmt: skip
    with pytest.raises(vlkv.InputError, match=r"missing key .*layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
        vlkv.load_params(tmp_path / "apart")
    rewrite(saved[1], tmp_path / "short", lambda key, x: {key: x[:, :-1]})
    with pytest.raises(vlkv.InputError, match=r"experts\.\w+ has shape"):
        vlkv.load_params(tmp_path / "short")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob='yes'"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds the number of experts, 6"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"num_local_experts": -1}, "num_experts=-1"),
        ({"num_experts": 8}, "num_experts=8 and num_local_experts=6"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers=.4. must be indices of 4 layers"),
        ({"moe_intermediate_size": None, "hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "qwen3_vl_text"}, "text_config.model_type"),
        ({"rope_parameters": ROPE}, "mrope_section is missing"),
    ],
    ids=str,
)
def test_a_config_that_is_not_honoured(saved, change, message):
    raw = json.loads((saved[1] / "config.json").read_text())
    raw["text_config"] |= change
    with pytest.raises(vlkv.InputError, match=message):
        config_from_hf(raw)


def test_the_head_is_tied_only_by_the_outer_config(saved):
    raw = json.loads((saved[1] / "config.json").read_text())
    assert raw["text_config"]["tie_word_embeddings"] and not saved[2].config.decoder.tied
    assert config_from_hf(raw | {"tie_word_embeddings": True}).decoder.tied
