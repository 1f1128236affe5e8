"""GLM-4.1V, GLM-4.6V and GLM-OCR against transformers in float32."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families import common_glm
from tests.families.common import (
    NEW,
    answer,
    check_answers,
    check_neighbours,
    check_states,
    every_stage,
    joined,
    save_file,
    torch,
)
from tests.families.common_glm import IMAGE, KINDS, MERGE, ROWS, START, VALUES, make, make_row, make_rows
from tests.models import same
from vlkv import policies
from vlkv.families import config_from_hf
from vlkv.families.glm.tower import cubic_weights

prefill = jax.jit(vlkv.prefill, static_argnames="new_tokens")
MIXED = (2, ("image", 1, 4, 2), 1, ("video", 2, 2, 4), 3, ("image", 1, 2, 2), 4)


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param)
    model.save_pretrained(folder)
    return model, folder, vlkv.load_params(folder)


@pytest.mark.default("glm4v-left", "glm_ocr-right")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_layers_and_logits_of_a_batch(saved, padding):
    """Two images, two videos, one image that is larger than the table, none."""
    model, _, params = saved
    rows = make_rows()
    inputs = check_states(params, rows, [answer(model, row) for row in rows], padding)
    assert inputs.grid[1, :, 0].max() == 2, "each frame of a video is an image to a policy"


@pytest.mark.full
def test_no_picture_at_all(saved):
    model, _, params = saved
    rows = make_rows(((5,), (9,)))
    assert check_states(params, rows, [answer(model, row) for row in rows]).pixels is None


@pytest.mark.full
def test_greedy_tokens(saved):
    model, _, params = saved
    rows = make_rows()
    inputs = vlkv.Inputs.from_hf(joined(rows, "left"), params.config)
    check_answers(params, inputs, [answer(model, row, NEW) for row in rows])


@pytest.mark.full
def test_a_row_is_answered_alike_whatever_its_neighbours(saved):
    check_neighbours(saved[2], make_rows(), every_stage())


@pytest.mark.full
def test_images_and_a_video_in_one_prompt(saved):
    model, _, params = saved
    row = make_rows((MIXED,))[0]
    inputs = vlkv.Inputs.from_hf(joined([row]), params.config)
    logits, positions = common_glm.mixed(model, row)
    np.testing.assert_array_equal(inputs.positions[0, : len(row.ids)], positions)
    ours = np.asarray(jax.jit(vlkv.forward)(params, inputs))[0, : len(row.ids)]
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    assert logits.std() >= 1


@pytest.mark.full
@pytest.mark.parametrize("policy", [policies.Full(), policies.SnapKV(keep=0.9, window=2)], ids=str)
def test_a_later_turn_with_an_image(saved, policy):
    """After a full cache, logits are those of one prompt with both turns; after eviction they are finite."""
    model, _, params = saved
    rng = np.random.default_rng(5)
    turns = [make_row(pieces, rng) for pieces in ((4, ("image", 1, 4, 6), 3), (2, ("image", 1, 6, 2), 5))]
    first, second = (vlkv.Inputs.from_hf(joined([row]), params.config) for row in turns)
    cache, _ = prefill(params, first, policy, new_tokens=24)
    _, logits = jax.jit(vlkv.extend)(params, cache, second)
    if not isinstance(policy, policies.Full):
        assert np.isfinite(logits).all()
        return
    extra = {name: [*turns[0].extra[name], *turns[1].extra[name]] for name in turns[0].extra}
    extra["mm_token_type_ids"] = [[kind for kinds in extra["mm_token_type_ids"] for kind in kinds]]
    both = common_glm.Row(turns[0].ids + turns[1].ids, extra)
    np.testing.assert_allclose(logits[0], answer(model, both)[1][-1], atol=1e-4)


def test_positions_of_many_sizes(saved):
    """100 random images and videos in random prompts: transformers' rope index, its delta and the grids."""
    model, _, params = saved
    rng = np.random.default_rng(1)
    for _ in range(25):
        pieces = [int(rng.integers(1, 6))]
        for _ in range(4):
            lines, columns = 2 * rng.integers(1, 8, 2)
            frames = int(rng.integers(1, 6))
            pieces += [("video", frames, lines, columns) if rng.random() < 0.5 else ("image", 1, lines, columns)]
            pieces += [int(rng.integers(0, 6))]
        row = make_row(pieces, rng)
        given = {name: torch.tensor(np.asarray(value)) for name, value in row.extra.items() if "pixel" not in name}
        positions, delta = model.model.get_rope_index(torch.tensor([row.ids]), **given)
        inputs = vlkv.Inputs.from_hf(joined([row, make_row((3,), rng)], "left"), params.config)
        valid = inputs.valid[0]
        np.testing.assert_array_equal(inputs.positions[0][valid], positions[:, 0].numpy().T)
        assert inputs.positions[0].max() + 1 - valid.sum() == int(delta[0, 0])
        assert inputs.is_vision[0].sum() == (inputs.tokens[0] == IMAGE).sum()
        # Every vision token is where its pixels are.
        place = inputs.layout["place"].reshape(-1, 4, 2)[inputs.vision_index[0][inputs.is_vision[0]], 0]
        np.testing.assert_array_equal(place, MERGE * inputs.grid[0][inputs.is_vision[0], 1:])


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
    model, folder, params = saved
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    convert(folder, tmp_path / "converted", progress=False)
    for other in ("sharded", "converted"):
        same(params, vlkv.load_params(tmp_path / other))


@pytest.mark.default("partial_rotary_factor")
@pytest.mark.parametrize("scale", [{}, {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}], ids=str)
def test_glm46v_is_the_same_model(tmp_path, scale):
    """Its checkpoints have another `model_type`; a quarter of the channels is rotated in the second case."""
    model = make("glm46v", rope=scale)
    model.save_pretrained(tmp_path)
    params = vlkv.load_params(tmp_path)
    rows = make_rows(ROWS[:1])
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
    make("glm4v", tied=True).save_pretrained(tmp_path)
    params = vlkv.load_params(tmp_path)
    assert params.config.decoder.tied and params.decoder.head is None
    assert not saved[2].config.decoder.tied


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
    raw = json.loads(make("glm4v").config.to_json_string())
    raw["vision_config"] |= change.get("vision", {})
    raw["text_config"] |= {key: value for key, value in change.items() if key != "vision"}
    with pytest.raises(vlkv.InputError, match=message) as error:
        config_from_hf(raw)
    assert len(str(error.value)) <= 200


def test_a_bias_that_transformers_ignores():
    raw = json.loads(make("glm_ocr").config.to_json_string())
    raw["text_config"]["attention_bias"] = True
    with pytest.raises(vlkv.InputError, match=r"text_config\.attention_bias=True"):
        config_from_hf(raw)


def test_models_with_experts_are_refused_by_name():
    transformers = pytest.importorskip("transformers")
    raw = transformers.Glm4vMoeConfig().to_dict()
    with pytest.raises(vlkv.InputError, match=r"GLM-4\.6V-Flash is supported") as error:
        config_from_hf(raw)
    assert len(str(error.value)) <= 200


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
