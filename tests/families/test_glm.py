"""GLM-4.1V, GLM-4.6V and GLM-OCR against transformers in float32."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest

import vlkv
from tests.families import common_glm
from tests.families.common import (
    ParityTests,
    answer,
    check_files,
    check_later_turn,
    check_positions,
    check_refused,
    check_states,
    check_tied,
    extend,
    forward,
    joined,
    prefill,
    random_pieces,
    save,
    save_file,
    whole,
)
from tests.families.common_glm import IMAGE, KINDS, ROWS, START, VALUES, make, make_row, make_rows
from tests.parity.conftest import torch, transformers
from vlkv import policies
from vlkv.families.glm.tower import cubic_weights

MIXED = (2, ("image", 1, 4, 2), 1, ("video", 2, 2, 4), 3, ("image", 1, 2, 2), 4)


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """Rows with two images, two videos, one image that is larger than the table, and none."""
    return save(make(request.param), tmp_path_factory.mktemp(request.param), make_rows())


class TestParity(ParityTests):
    pass


def test_each_frame_of_a_video_is_an_image_to_a_policy(saved):
    assert vlkv.Inputs.from_hf(joined(saved[3]), saved[2].config).grid[1, :, 0].max() == 2


@pytest.mark.full
def test_no_picture_at_all(saved):
    model, _, params, _ = saved
    rows = make_rows(((5,), (9,)))
    assert check_states(params, rows, [answer(model, row) for row in rows]).pixels is None


@pytest.mark.full
def test_images_and_a_video_in_one_prompt(saved):
    model, _, params, _ = saved
    row = make_rows((MIXED,))[0]
    inputs = vlkv.Inputs.from_hf(joined([row]), params.config)
    logits, positions = common_glm.mixed(model, row)
    np.testing.assert_array_equal(inputs.positions[0, : len(row.ids)], positions)
    ours = np.asarray(forward(params, inputs))[0, : len(row.ids)]
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    assert logits.std() >= 1


@pytest.mark.full
def test_a_later_turn_with_an_image(saved):
    """After a full cache, logits are those of one prompt with both turns; after eviction they are finite."""
    model, _, params, _ = saved
    turns = make_rows(((4, ("image", 1, 4, 6), 3), (2, ("image", 1, 6, 2), 5)), seed=5)
    check_later_turn(params, turns, answer(model, whole(*turns))[1][-1])
    first, second = (vlkv.Inputs.from_hf(joined([row]), params.config) for row in turns)
    cache, _ = prefill(params, first, policies.SnapKV(keep=0.9, window=2), new_tokens=24)
    assert np.isfinite(extend(params, cache, second)[1]).all()


def test_positions_of_many_sizes(saved):
    """100 random images and videos in random prompts: transformers' rope index, its delta and the grids."""
    model, _, params, _ = saved
    rng = np.random.default_rng(1)
    for _ in range(25):
        row = make_row(random_pieces(rng, lambda lines, columns: 5), rng)
        inputs = check_positions(model, params, row, make_row((3,), rng))
        assert inputs.is_vision[0].sum() == (inputs.tokens[0] == IMAGE).sum()


@pytest.mark.parametrize(("count", "table"), [(1, 5), (2, 5), (7, 5), (24, 24), (31, 24), (90, 24)])
def test_positions_of_the_table_are_those_of_grid_sample(count, table):
    """One axis after the other, with padding patches."""
    values = np.random.default_rng(count).normal(size=(table, 3)).astype(np.float32)
    place = np.concatenate([np.arange(count), [-1, -1]])[None]
    ours = np.asarray(jax.jit(cubic_weights, static_argnums=1)(place, table))[0, :count] @ values
    at = (torch.arange(count) + 0.5) / count * 2 - 1
    grid = torch.stack([torch.zeros(count), at], dim=-1)[None, :, None]
    image = torch.tensor(values.T)[None, :, :, None].expand(-1, -1, -1, 4).contiguous()
    theirs = torch.nn.functional.grid_sample(image, grid, mode="bicubic", align_corners=False, padding_mode="border")
    np.testing.assert_allclose(ours, theirs[0, :, :, 0].T.numpy(), atol=1e-5)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_every_name_on_disk_gives_the_same_parameters(saved, tmp_path):
    check_files(saved, tmp_path)


@pytest.mark.default("partial_rotary_factor")
@pytest.mark.parametrize("scale", [{}, {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}], ids=str)
def test_glm46v_is_the_same_model(tmp_path, scale):
    """Its checkpoints have another `model_type`; a quarter of the channels is rotated in the second case."""
    model, _, params, rows = save(make("glm46v", rope=scale), tmp_path, make_rows(ROWS[:1]))
    check_states(params, rows, [answer(model, row) for row in rows])


def test_the_layer_that_predicts_further_tokens_is_not_needed(tmp_path):
    """The published GLM-OCR has one layer more than `num_hidden_layers`. Other kinds with such a layer are refused."""
    from safetensors.numpy import load_file

    for kind in KINDS:
        folder = tmp_path / kind
        make(kind).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        more = {
            key.replace("layers.1.", "layers.2."): x for key, x in tensors.items() if "language_model.layers.1." in key
        }
        more["model.language_model.layers.2.eh_proj.weight"] = tensors["lm_head.weight"]
        save_file({key: torch.tensor(x) for key, x in (tensors | more).items()}, folder / "model.safetensors")
    vlkv.load_params(tmp_path / "glm_ocr")
    with pytest.raises(vlkv.InputError, match=r"layers\.2"):
        vlkv.load_params(tmp_path / "glm4v")


def test_a_head_that_is_the_embedding_table(saved, tmp_path):
    check_tied(make("glm4v", tied=True), saved[2], tmp_path)


ROPE = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": ROPE}, "mrope_section is missing"),
        ({"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}, "half of 8 channels"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.3}}, "rotates 4 of 16|mrope_section"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, "rotates 24 of 16 channels"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.2}}, "rotates 3 of 16 channels"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": "half"}}, "must be a number"),
        ({"head_dim": 32, "rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}, "head_dim=32"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "glm_ocr_text"}, "text_config.model_type"),
        ({"model_type": "glm4v_moe_text"}, re.escape("glm4v_moe (GLM-4.5V, GLM-4.6V) is not supported")),
        ({"vision": {"model_type": "glm_ocr_vision"}}, "vision_config.model_type"),
        ({"vision": {"hidden_act": "gelu"}}, "hidden_act"),
        ({"vision": {"temporal_patch_size": 1}}, "temporal_patch_size"),
        ({"vision": {"image_size": 3}}, "at least patch_size"),
        ({"vision": {"image_size": [20, 20]}}, "whole number"),
        ({"vision": {"out_hidden_size": 48}}, "48 channels"),
        ({"vision": {"hidden_size": 36}}, "multiple of four channels"),
        ({"vision": {"attention_bias": "yes"}}, "attention_bias"),
    ],
    ids=str,
)
def test_a_config_that_is_not_honoured(change, message):
    check_refused(json.loads(make("glm4v").config.to_json_string()), change, message)


def test_a_bias_that_transformers_ignores():
    raw = json.loads(make("glm_ocr").config.to_json_string())
    check_refused(raw, {"attention_bias": True}, r"text_config\.attention_bias=True")


def test_models_with_experts_are_refused_by_name():
    raw = transformers.Glm4vMoeConfig().to_dict()
    check_refused(raw, {}, r"GLM-4\.6V-Flash is supported")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": np.zeros((3, VALUES), np.float32)}, "pixel_values have shape"),
        ({"image_grid_thw": None}, "no image_grid_thw"),
        ({"image_grid_thw": np.array([[1, 3, 8]])}, "multiples of 2"),
        ({"pixel_values": None}, "but 0 image"),
        ({"pixel_values": np.zeros((32, VALUES)), "image_grid_thw": np.array([[1, 4, 8]])}, "need 8"),
    ],
)
def test_what_does_not_match_is_refused(saved, change, message):
    batch = joined(make_rows(((2, ("image", 1, 4, 6), 3),)))
    with pytest.raises(vlkv.InputError, match=message):
        vlkv.Inputs.from_hf(batch | change, saved[2].config)


def test_a_video_without_its_marks_is_an_image_without_pixels(saved):
    batch = joined(make_rows(((2, ("video", 1, 4, 6), 3),)))
    batch["input_ids"] = np.where(batch["input_ids"] == common_glm.VIDEO_START, 5, batch["input_ids"])
    with pytest.raises(vlkv.InputError, match="the image tokens do not fit the images or videos"):
        vlkv.Inputs.from_hf(batch, saved[2].config)


def test_marks_around_pictures_are_text(saved):
    inputs = vlkv.Inputs.from_hf(joined(make_rows()), saved[2].config)
    for mark in (START, common_glm.VIDEO_START, common_glm.VIDEO_END):
        assert not inputs.is_vision[inputs.tokens == mark].any()
    assert (inputs.grid[~inputs.is_vision] == -1).all()
