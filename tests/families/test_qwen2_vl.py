"""Qwen2-VL and Qwen2.5-VL against transformers in float32, and their positions through decoding and eviction."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.families.common import (
    ParityTests,
    Row,
    answer,
    check_files,
    check_positions,
    check_refused,
    check_states,
    check_tied,
    joined,
    prefill,
    random_pieces,
    raw_of,
    read,
    rope_index,
    save,
)
from tests.families.common_qwen import IMAGE, KINDS, ROWS, START, VALUES, make, make_row, make_rows
from tests.generation.test_decode import kept_entries
from vlkv import policies

FORCED = np.random.default_rng(3).integers(6, 90, (len(ROWS), 5))


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """Rows with two images, an image and a video, one image, and none."""
    return save(make(request.param), tmp_path_factory.mktemp(request.param), rows_of(request.param))


def rows_of(kind: str, rows=ROWS) -> list[Row]:
    return make_rows(rows, seconds=kind == "qwen2_5_vl")


@pytest.fixture
def batch_of(saved):
    """`Inputs` of some rows, in which some arrays of the processor are others."""
    config = saved[2].config

    def made(rows, **changes) -> vlkv.Inputs:
        return vlkv.Inputs.from_hf(joined(rows_of(config.family, rows)) | changes, config)

    return made


class TestParity(ParityTests):
    pass


def test_no_picture_at_all(saved):
    model, _, params, _ = saved
    rows = make_rows(((5,), (9,)))
    assert check_states(params, rows, [answer(model, row) for row in rows]).pixels is None


@pytest.mark.full
def test_after_eviction_positions_go_on_from_the_whole_prompt(saved):
    """Float64 numpy with every position written out: the prompt's by transformers, then its length plus rope delta."""
    model, _, params, rows = saved
    inputs, policy = vlkv.Inputs.from_hf(joined(rows, "left"), params.config), policies.SnapKV(keep=0.4, window=4)
    cache, logits = prefill(params, inputs, policy, new_tokens=len(FORCED[0]))
    kept = [kept_entries(cache, inputs, row) for row in range(len(ROWS))]
    x = np.asarray(read(params, inputs)[0][0])
    step, ours = programs.decode_step, [logits]
    for token in FORCED.T:
        cache, logits = step(params, cache, token)
        ours.append(logits)
    for number, row in enumerate(rows):
        length = len(row.ids)
        if number == 3:  # transformers has no rope index without pictures
            positions, delta = np.arange(length)[:, None].repeat(3, axis=1), 0
        else:
            positions, delta = rope_index(model, row)
            assert delta < 0
        assert not kept[number].all()
        first, layers = reference.prefill(params.decoder, x[number, inputs.valid[number]], positions)
        theirs = reference.decode(params.decoder, layers, kept[number], FORCED[number], first=length + delta)
        np.testing.assert_allclose(np.stack(ours)[:, number], np.concatenate([first[None], theirs]), atol=1e-4)


@pytest.mark.full
def test_a_renumbered_prompt_goes_on_from_its_own_length(saved):
    """LightKV as published numbers what is left anew, alike on all axes; here the prompt ends with an image, too."""
    params, rows = saved[2], make_rows(((6, ("image", 1, 8, 8)), (30,)))
    rows[0].ids[-1] = 7  # no longer a mark
    policy = policies.LightKV(layers=(1,), windows=(1,), rho=0.5, variant="released")
    cache, logits = prefill(params, vlkv.Inputs.from_hf(joined(rows), params.config), policy, new_tokens=4)
    assert np.isfinite(logits).all()
    length = np.asarray(cache.counts[:, :, 0])
    assert length.tolist() == [[8 + 16, 30], [8 + 8, 30]]
    np.testing.assert_array_equal(cache.next_position, length[1][:, None].repeat(3, axis=1))


@pytest.mark.full
def test_a_step_that_evicts_runs_on_unequal_rows(saved, batch_of):
    inputs, sampling = batch_of(ROWS), vlkv.Greedy(max_new_tokens=4, stop=())
    output = programs.generate(saved[2], inputs, policy=policies.H2O(keep=0.5), sampling=sampling)
    length = output.kept.sum(axis=-1)
    assert (length > 0).all() and (length[1] <= inputs.valid.sum(axis=1)[:, None]).all()
    assert length[1, :2].sum() < 2 * inputs.valid[:2].sum()
    assert not (output.kept & ~inputs.valid[:, None]).any()


def test_every_name_on_disk_gives_the_same_parameters(saved, tmp_path):
    """Old keys and a flat config, new keys, sharded, converted."""
    saved[0].save_pretrained(tmp_path / "new", save_original_format=False)
    flatten(tmp_path / "new", tmp_path / "flat")
    check_files(saved, tmp_path, "new", "flat")


def test_a_head_that_is_the_embedding_table(saved, tmp_path):
    params = saved[2]
    check_tied(make(params.config.family, tied=True), params, tmp_path)


def flatten(source, target) -> None:
    """As transformers 4 wrote it: text fields in the outer object, `in_chans`, `rope_scaling`, keys without levels."""
    from safetensors.numpy import load_file, save_file

    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    assert any(key.startswith("model.language_model.") for key in tensors)
    old = {key.replace("model.visual.", "visual.").replace(".language_model.", "."): v for key, v in tensors.items()}
    save_file(old, target / "model.safetensors")
    raw = raw_of(source)
    text, vision = raw.pop("text_config"), raw["vision_config"]
    rope = text.pop("rope_parameters")
    for nested in ("model_type", "layer_types"):
        text.pop(nested)
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["rope_theta"] = rope["rope_theta"]
    vision.pop("rope_parameters", None)
    vision["in_chans"] = vision.pop("in_channels")
    (target / "config.json").write_text(json.dumps({**text, **raw}))


def test_positions_of_many_sizes(saved):
    """200 random images and videos in random prompts: exactly transformers' rope index, its deltas and its grids."""
    model, _, params, _ = saved
    rng, seconds = np.random.default_rng(1), params.config.family == "qwen2_5_vl"
    for _ in range(50):
        # So few frames that time is never the greatest axis: the next test has longer videos.
        pieces = random_pieces(rng, lambda lines, columns: max(1, max(lines, columns) / 2 / 1.4))
        inputs = check_positions(model, params, make_row(pieces, rng, seconds=seconds), make_row((3,), rng))
        assert inputs.is_vision[0].sum() == sum(np.prod(p[1:]) // 4 for p in pieces if not isinstance(p, int))


def test_text_after_a_long_video_comes_after_its_last_frame(saved, batch_of):
    """The rule of the paper and of transformers 4, written out; transformers 5.23 would put it among the frames."""
    inputs = batch_of(((1, ("video", 6, 4, 4), 2),))
    step = 1.4 if saved[2].config.family == "qwen2_5_vl" else 1
    frame = np.trunc(np.arange(6) * step).astype(int).repeat(4)
    square = np.tile([[0, 0], [0, 1], [1, 0], [1, 1]], (6, 1))
    last = 2 + frame[-1]
    want = [[0] * 3, [1] * 3, *(2 + np.column_stack([frame, square])), *([last + i] * 3 for i in (1, 2, 3))]
    np.testing.assert_array_equal(inputs.positions[0, : len(want)], want)
    assert inputs.max_images >= 6, "each frame is an image to a policy"
    assert inputs.grid[0, 2:26, 0].tolist() == np.arange(6).repeat(4).tolist()


def test_whole_seconds(saved):
    config = saved[2].config
    whole = dataclasses.replace(config, vision=dataclasses.replace(config.vision, whole_seconds=True))
    batch = joined(make_rows(((1, ("video", 3, 4, 4), 2),))) | {"second_per_grid_ts": [1.6]}
    frames = [vlkv.Inputs.from_hf(batch, c).positions[0, 2:14:4, 0].tolist() for c in (config, whole)]
    assert frames == ([[2, 5, 8], [2, 4, 6]] if config.family == "qwen2_5_vl" else [[2, 3, 4]] * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": np.zeros((3, VALUES), np.float32)}, "pixel_values have shape"),
        ({"image_grid_thw": None}, "no image_grid_thw"),
        ({"image_grid_thw": np.array([[1, 3, 6]])}, "multiples of 2"),
        ({"pixel_values": None}, "but 0 image"),
        ({"pixel_values": np.zeros((48, VALUES)), "image_grid_thw": np.array([[1, 4, 6]] * 2)}, "but 2 image"),
        ({"pixel_values": np.zeros((32, VALUES)), "image_grid_thw": np.array([[1, 4, 8]])}, "need 8"),
        ({"second_per_grid_ts": [1.0, 2.0]}, "second_per_grid_ts"),
    ],
)
def test_what_does_not_match_is_refused(batch_of, change, message):
    kind = "video" if "second_per_grid_ts" in change else "image"
    with pytest.raises(vlkv.InputError, match=message):
        batch_of(((2, (kind, 1, 4, 6), 3),), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "mrope_section"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "ntk", "mrope_section": [2, 1, 1]}}, "ntk"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1, "layer_types": None}, "window=0"),
        ({"vision": {"hidden_act": "relu"}}, "hidden_act"),
        ({"vision": {"in_channels": 4}}, "in_channels"),
        ({"vision": {"hidden_size": 64, "out_hidden_size": 64}}, "64 channels"),
    ],
)
def test_a_config_that_is_not_honoured(saved, change, message):
    check_refused(raw_of(saved[1]), change, message)


def test_marks_around_pictures_are_text(batch_of):
    inputs = batch_of(ROWS)
    assert not inputs.is_vision[inputs.tokens == START].any()
    assert (inputs.grid[~inputs.is_vision] == -1).all()
    assert (inputs.tokens[0][inputs.is_vision[0]] == IMAGE).all()
