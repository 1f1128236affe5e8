"""Qwen3-VL with experts against transformers in float32, and every layout of the experts' tensors on disk."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from checkpoints_convert.__main__ import convert
from tests import programs, reference
from tests.families.common import (
    ParityTests,
    Row,
    answer,
    check_refused,
    check_states,
    joined,
    prefill,
    raw_of,
    save,
)
from tests.families.common_qwen import ROWS, make, make_rows
from tests.families.test_qwen3_vl import ROPE
from tests.generation.test_decode import kept_entries
from tests.models import same
from tests.parity.conftest import torch
from vlkv import policies
from vlkv.families import config_from_hf

KIND = "qwen3_vl_moe"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Rows with two images, an image and a video, one image, and none; the second layer has an ordinary MLP."""
    model, rows = make(KIND), make_rows(apart=True)
    check_no_ties(model, rows)
    return save(model, tmp_path_factory.mktemp(KIND), rows)


def check_no_ties(model, rows: list[Row]) -> None:
    """Asserts that the router's choice does not depend on rounding."""
    seen = []
    routers = [layer.mlp.gate for layer in model.model.language_model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(lambda _, __, out: seen.append(out[0])) for router in routers]
    for row in rows:
        answer(model, row)
    for hook in hooks:
        hook.remove()
    best = torch.cat(seen).sort(descending=True).values
    active = model.config.text_config.num_experts_per_tok
    assert len(seen) == 3 * len(rows) and (best[:, active - 1] - best[:, active]).min() > 1e-4


class TestParity(ParityTests):
    before = True


@pytest.mark.full
def test_experts_without_a_token(tmp_path):
    """Five tokens reach at most ten of sixteen experts."""
    model, _, params, rows = save(make(KIND, num_experts=16), tmp_path, make_rows(((3,), (2,))))
    check_states(params, rows, [answer(model, row) for row in rows])


@pytest.mark.full
def test_several_videos_in_a_prompt(saved):
    model, _, params, _ = saved
    pieces = ((4, ("video", 3, 4, 4), 2, ("video", 2, 6, 2), 5, ("image", 1, 4, 6), 2), (7,))
    rows = make_rows(pieces, apart=True)
    check_states(params, rows, [answer(model, row) for row in rows], "left", before=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["SnapKV", "LightKV"])
def test_decoding_from_what_is_kept(saved, name):
    """Float64 numpy. LightKV merges tokens, so here only its run is checked."""
    params = saved[2]
    inputs = vlkv.Inputs.from_hf(joined(saved[3], "left"), params.config)
    policy = policies.SnapKV(keep=0.4, window=4) if name == "SnapKV" else policies.LightKV(
        layers=(1,), windows=(1,), rho=0.5)  # fmt: skip
    forced = np.random.default_rng(3).integers(6, 90, (len(ROWS), 3))
    cache, logits = prefill(params, inputs, policy, new_tokens=3)
    kept = [kept_entries(cache, inputs, row) for row in range(len(ROWS))]
    ours, step = [logits], programs.decode_step
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
    _, folder, params, _ = saved
    rewrite(folder, tmp_path / "exchanged", exchanged)
    rewrite(folder, tmp_path / "apart", apart)
    for source in ("exchanged", "apart"):
        convert(tmp_path / source, tmp_path / f"{source} converted", progress=False)
    convert(tmp_path / "apart", tmp_path / "orbax", format="orbax", progress=False)
    for other in ("exchanged", "exchanged converted", "apart", "apart converted", "orbax"):
        same(params, vlkv.load_params(tmp_path / other))


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
    check_refused(raw_of(saved[1]), change, message)


def test_the_head_is_tied_only_by_the_outer_config(saved):
    raw = raw_of(saved[1])
    assert raw["text_config"]["tie_word_embeddings"] and not saved[2].config.decoder.tied
    assert config_from_hf(raw | {"tie_word_embeddings": True}).decoder.tied
