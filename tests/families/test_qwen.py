"""What is special about Qwen2-VL, Qwen2.5-VL and experts; `test_every_family.py` has the rest."""

import dataclasses

import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import answer, joined, prefill, raw_of
from tests.families.common_qwen import apart, make_rows, rewrite_experts
from tests.models import same
from tests.parity.conftest import torch
from vlkv import policies
from vlkv.families import config_from_hf

KINDS = ("qwen2_vl", "qwen2_5_vl")


@pytest.mark.full
def test_a_renumbered_prompt_goes_on_from_its_own_length(saved):
    """LightKV as published numbers what is left anew, alike on all axes; here the prompt ends with an image, too."""
    params, rows = saved("qwen2_vl").params, make_rows(((6, ("image", 1, 8, 8)), (30,)))
    rows[0].ids[-1] = 7  # no longer a mark
    policy = policies.LightKV(layers=(1,), windows=(1,), rho=0.5, variant="released")
    cache, logits = prefill(params, vlkv.Inputs.from_hf(joined(rows), params.config), policy, new_tokens=4)
    assert np.isfinite(logits).all()
    length = np.asarray(cache.counts[:, :, 0])
    assert length.tolist() == [[8 + 16, 30], [8 + 8, 30]]
    np.testing.assert_array_equal(cache.next_position, length[1][:, None].repeat(3, axis=1))


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_a_long_video_comes_after_its_last_frame(saved, kind):
    """The rule of the paper and of transformers 4, written out; transformers 5.23 would put it among the frames."""
    config = saved(kind).params.config
    inputs = vlkv.Inputs.from_hf(joined(make_rows(((1, ("video", 6, 4, 4), 2),), seconds=kind == "qwen2_5_vl")), config)
    step = 1.4 if kind == "qwen2_5_vl" else 1
    frame = np.trunc(np.arange(6) * step).astype(int).repeat(4)
    square = np.tile([[0, 0], [0, 1], [1, 0], [1, 1]], (6, 1))
    last = 2 + frame[-1]
    want = [[0] * 3, [1] * 3, *(2 + np.column_stack([frame, square])), *([last + i] * 3 for i in (1, 2, 3))]
    np.testing.assert_array_equal(inputs.positions[0, : len(want)], want)
    assert inputs.max_images >= 6, "each frame is an image to a policy"
    assert inputs.grid[0, 2:26, 0].tolist() == np.arange(6).repeat(4).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_whole_seconds(saved, kind):
    config = saved(kind).params.config
    whole = dataclasses.replace(config, vision=dataclasses.replace(config.vision, whole_seconds=True))
    batch = joined(make_rows(((1, ("video", 3, 4, 4), 2),))) | {"second_per_grid_ts": [1.6]}
    frames = [vlkv.Inputs.from_hf(batch, c).positions[0, 2:14:4, 0].tolist() for c in (config, whole)]
    assert frames == ([[2, 5, 8], [2, 4, 6]] if kind == "qwen2_5_vl" else [[2, 3, 4]] * 2)


def test_seconds_of_other_videos_are_refused(saved):
    batch = joined(make_rows(((2, ("video", 1, 4, 6), 3),), seconds=True)) | {"second_per_grid_ts": [1.0, 2.0]}
    with pytest.raises(vlkv.InputError, match="second_per_grid_ts"):
        vlkv.Inputs.from_hf(batch, saved("qwen2_5_vl").params.config)


KIND = "qwen3_vl_moe"


def test_the_routers_choice_does_not_depend_on_rounding(saved):
    """Else parity would be a matter of luck."""
    seen, (model, _, _, rows) = [], saved(KIND)
    routers = [layer.mlp.gate for layer in model.model.language_model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(lambda _, __, out: seen.append(out[0])) for router in routers]
    for row in rows:
        answer(model, row)
    for hook in hooks:
        hook.remove()
    best = torch.cat(seen).sort(descending=True).values
    active = model.config.text_config.num_experts_per_tok
    assert len(seen) == 3 * len(rows) and (best[:, active - 1] - best[:, active]).min() > 1e-4


def test_single_experts_become_one_tensor_in_orbax(saved, tmp_path):
    rewrite_experts(apart, saved(KIND), tmp_path / "apart")
    made = convert(tmp_path / "apart", tmp_path / "orbax", format="orbax", progress=False)
    same(saved(KIND).params, vlkv.load_params(made))


def test_an_expert_that_is_missing_is_named(saved, tmp_path):
    lost = "layers.2.mlp.experts.4.up"

    def less(key, x):
        return {name: part for name, part in apart(key, x).items() if lost not in name}

    rewrite_experts(less, saved(KIND), tmp_path / "apart")
    with pytest.raises(vlkv.InputError, match=r"missing key .*layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
        vlkv.load_params(tmp_path / "apart")
    rewrite_experts(lambda key, x: {key: x[:, :-1]}, saved(KIND), tmp_path / "short")
    with pytest.raises(vlkv.InputError, match=r"experts\.\w+ has shape"):
        vlkv.load_params(tmp_path / "short")


@pytest.mark.parametrize("kind", [KIND, "qwen3_5"])
def test_the_head_is_tied_only_by_the_outer_config(saved, kind):
    raw = raw_of(saved(kind).folder)
    raw["text_config"]["tie_word_embeddings"] = True
    assert not config_from_hf(raw).decoder.tied
    assert config_from_hf(raw | {"tie_word_embeddings": True}).decoder.tied
