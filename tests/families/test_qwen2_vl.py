"""Qwen2-VL and Qwen2.5-VL against transformers in float32, and their positions through decoding and eviction."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests import reference
from tests.families.common import read
from tests.families.common_qwen import (
    BUCKETS,
    IMAGE,
    KINDS,
    MERGE,
    ROWS,
    START,
    VALUES,
    for_model,
    make,
    one_row,
    prompts,
    torch,
)
from tests.generation.test_decode import kept_entries
from tests.models import same
from vlkv import policies
from vlkv.families import config_from_hf

prefill = jax.jit(vlkv.prefill, static_argnames="new_tokens")
FORCED = np.random.default_rng(3).integers(6, 90, (len(ROWS), 5))


@dataclasses.dataclass
class Case:
    kind: str
    model: object
    folder: object
    params: object

    def inputs(self, batch):
        return vlkv.Inputs.from_hf(batch, self.params.config, BUCKETS)


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param)
    model.save_pretrained(folder)
    return Case(request.param, model, folder, vlkv.load_params(folder))


def check(case, batch, rows=ROWS) -> None:
    states, logits = read(case.params, case.inputs(batch))
    mask = batch["attention_mask"].astype(bool)
    spread = []
    for row in range(len(rows)):
        with torch.no_grad():
            out = case.model(**for_model(case.kind, one_row(batch, row, rows)), output_hidden_states=True)
        spread.append(out.logits.numpy().ravel())
        own = np.flatnonzero(mask[row])
        # The last of transformers' hidden states is after the norm.
        for ours, theirs in zip([*states[:-1], logits], [*out.hidden_states[:-1], out.logits], strict=True):
            np.testing.assert_allclose(np.asarray(ours)[row, own], theirs[0].numpy(), atol=1e-4)
    assert np.concatenate(spread).std() >= 1


@pytest.mark.default("qwen2_vl-left", "qwen2_5_vl-right")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_layers_and_logits_of_a_batch(case, padding):
    """Two images, an image and a video, one image, none."""
    check(case, prompts(padding))


def test_no_picture_at_all(case):
    rows = ((5,), (9,))
    batch = prompts(rows=rows)
    assert case.inputs(batch).pixels is None
    check(case, batch, rows)


@pytest.mark.full
def test_greedy_tokens(case):
    batch = prompts("left")
    output = jax.jit(vlkv.generate)(
        case.params, case.inputs(batch), sampling=vlkv.Greedy(max_new_tokens=32, stop=())
    )  # fmt: skip
    for row in range(len(ROWS)):
        arguments = for_model(case.kind, one_row(batch, row))
        ids = arguments["input_ids"]
        tokens = case.model.generate(
            **arguments, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, eos_token_id=None
        )
        np.testing.assert_array_equal(output.tokens[row], tokens[0, ids.shape[1] :].numpy())


@pytest.mark.full
def test_after_eviction_positions_go_on_from_the_whole_prompt(case):
    """Float64 numpy with every position written out: the prompt's by transformers, then its length plus rope delta."""
    batch = prompts("left")
    inputs, policy = case.inputs(batch), policies.SnapKV(keep=0.4, window=4)
    cache, logits = prefill(case.params, inputs, policy, new_tokens=len(FORCED[0]))
    kept = [kept_entries(cache, inputs, row) for row in range(len(ROWS))]
    x = np.asarray(read(case.params, inputs)[0][0])
    step, ours = jax.jit(vlkv.decode_step), [logits]
    for token in FORCED.T:
        cache, logits = step(case.params, cache, token)
        ours.append(logits)
    deltas = []
    for row in range(len(ROWS)):
        arguments = one_row(batch, row)
        length = arguments["input_ids"].shape[1]
        if row == 3:  # transformers has no rope index without pictures
            positions, delta = np.arange(length)[:, None].repeat(3, axis=1), 0
        else:
            names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
            given = {name: arguments[name] for name in names if name in arguments}
            positions, delta = case.model.model.get_rope_index(**for_model(case.kind, given))
            positions, delta = positions[:, 0].numpy().T, int(delta[0, 0])
        deltas.append(delta)
        assert not kept[row].all()
        first, layers = reference.prefill(case.params.decoder, x[row, inputs.valid[row]], positions)
        theirs = reference.decode(case.params.decoder, layers, kept[row], FORCED[row], first=length + delta)
        np.testing.assert_allclose(np.stack(ours)[:, row], np.concatenate([first[None], theirs]), atol=1e-4)
    assert all(delta < 0 for delta in deltas[:3])


@pytest.mark.full
def test_a_renumbered_prompt_goes_on_from_its_own_length(case):
    """LightKV as published numbers what is left anew, alike on all axes; here the prompt ends with an image, too."""
    rows = ((6, ("image", 1, 8, 8)), (30,))
    batch = prompts(rows=rows)
    batch["input_ids"][0, np.flatnonzero(batch["attention_mask"][0])[-1]] = 7  # no longer a mark
    policy = policies.LightKV(layers=(1,), windows=(1,), rho=0.5, variant="released")
    cache, logits = prefill(case.params, case.inputs(batch), policy, new_tokens=4)
    assert np.isfinite(logits).all()
    length = np.asarray(cache.counts[:, :, 0])
    assert length.tolist() == [[8 + 16, 30], [8 + 8, 30]]
    np.testing.assert_array_equal(cache.next_position, length[1][:, None].repeat(3, axis=1))


@pytest.mark.full
def test_a_step_that_evicts_runs_on_unequal_rows(case):
    inputs, sampling = case.inputs(prompts()), vlkv.Greedy(max_new_tokens=4, stop=())
    output = jax.jit(vlkv.generate)(case.params, inputs, policy=policies.H2O(keep=0.5), sampling=sampling)
    length = output.kept.sum(axis=-1)
    assert (length > 0).all() and (length[1] <= inputs.valid.sum(axis=1)[:, None]).all()
    assert length[1, :2].sum() < 2 * inputs.valid[:2].sum()
    assert not (output.kept & ~inputs.valid[:, None]).any()


def test_every_name_on_disk_gives_the_same_parameters(case, tmp_path):
    """Old keys and a flat config, new keys, sharded, converted."""
    case.model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    case.model.save_pretrained(tmp_path / "new", save_original_format=False)
    flatten(tmp_path / "new", tmp_path / "flat")
    convert(case.folder, tmp_path / "converted", progress=False)
    for other in ("sharded", "new", "flat", "converted"):
        same(case.params, vlkv.load_params(tmp_path / other))


def test_a_head_that_is_the_embedding_table(case, tmp_path):
    make(case.kind, tied=True).save_pretrained(tmp_path)
    params = vlkv.load_params(tmp_path)
    assert params.config.decoder.tied and params.decoder.head is None
    assert not case.params.config.decoder.tied


def flatten(source, target) -> None:
    """As transformers 4 wrote it: text fields in the outer object, `in_chans`, `rope_scaling`, keys without levels."""
    from safetensors.numpy import load_file, save_file

    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    assert any(key.startswith("model.language_model.") for key in tensors)
    old = {key.replace("model.visual.", "visual.").replace(".language_model.", "."): v for key, v in tensors.items()}
    save_file(old, target / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    text, vision = raw.pop("text_config"), raw["vision_config"]
    rope = text.pop("rope_parameters")
    for nested in ("model_type", "layer_types"):
        text.pop(nested)
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["rope_theta"] = rope["rope_theta"]
    vision.pop("rope_parameters", None)
    vision["in_chans"] = vision.pop("in_channels")
    (target / "config.json").write_text(json.dumps({**text, **raw}))


def test_positions_of_many_sizes(case):
    """200 random images and videos in random prompts: exactly transformers' rope index, its deltas and its grids."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        row = [int(rng.integers(1, 6))]
        for _ in range(4):
            lines, columns = 2 * rng.integers(1, 8, 2)
            # So few frames that time is never the greatest axis: the next test has longer videos.
            frames = int(rng.integers(1, 1 + max(1, max(lines, columns) / 2 / 1.4)))
            row += [("video", frames, lines, columns) if rng.random() < 0.5 else ("image", 1, lines, columns)]
            row += [int(rng.integers(1, 6))]
        batch = prompts("left", rows=(row, (3,)))
        given = {name: value for name, value in one_row(batch, 0, (row, (3,))).items() if "pixel" not in name}
        positions, delta = case.model.model.get_rope_index(**for_model(case.kind, given))
        inputs, valid = case.inputs(batch), batch["attention_mask"][0].astype(bool)
        length = batch["input_ids"].shape[1]
        np.testing.assert_array_equal(inputs.positions[0, :length][valid], positions[:, 0].numpy().T)
        assert inputs.positions[0].max() + 1 - valid.sum() == int(delta[0, 0])
        assert inputs.is_vision[0].sum() == sum(np.prod(p[1:]) // 4 for p in row if not isinstance(p, int))
        # Every vision token is where its pixels are: the first number of its first patch names it.
        grid, place = inputs.grid[0][inputs.is_vision[0]], inputs.layout["place"].reshape(-1, 4, 2)
        at = place[inputs.vision_index[0][inputs.is_vision[0]], 0]
        np.testing.assert_array_equal(at, MERGE * grid[:, 1:])


def test_text_after_a_long_video_comes_after_its_last_frame(case):
    """The rule of the paper and of transformers 4, written out; transformers 5.23 would put it among the frames."""
    batch = prompts(rows=((1, ("video", 6, 4, 4), 2),))
    inputs = case.inputs(batch)
    step = 1.4 if case.kind == "qwen2_5_vl" else 1
    frame = np.trunc(np.arange(6) * step).astype(int).repeat(4)
    square = np.tile([[0, 0], [0, 1], [1, 0], [1, 1]], (6, 1))
    last = 2 + frame[-1]
    want = [[0] * 3, [1] * 3, *(2 + np.column_stack([frame, square])), *([last + i] * 3 for i in (1, 2, 3))]
    np.testing.assert_array_equal(inputs.positions[0, : len(want)], want)
    assert inputs.max_images >= 6, "each frame is an image to a policy"
    assert inputs.grid[0, 2:26, 0].tolist() == np.arange(6).repeat(4).tolist()


def test_whole_seconds(case):
    config = case.params.config
    whole = dataclasses.replace(config, vision=dataclasses.replace(config.vision, whole_seconds=True))
    batch = prompts(rows=((1, ("video", 3, 4, 4), 2),)) | {"second_per_grid_ts": [1.6]}
    frames = [vlkv.Inputs.from_hf(batch, c, BUCKETS).positions[0, 2:14:4, 0].tolist() for c in (config, whole)]
    assert frames == ([[2, 5, 8], [2, 4, 6]] if case.kind == "qwen2_5_vl" else [[2, 3, 4]] * 2)


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
def test_what_does_not_match_is_refused(case, change, message):
    kind = "video" if "second_per_grid_ts" in change else "image"
    with pytest.raises(vlkv.InputError, match=message):
        case.inputs(prompts(rows=((2, (kind, 1, 4, 6), 3),)) | change)


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
def test_a_config_that_is_not_honoured(case, change, message):
    raw = json.loads((case.folder / "config.json").read_text())
    raw["vision_config"] |= change.get("vision", {})
    raw["text_config"] |= {key: value for key, value in change.items() if key != "vision"}
    with pytest.raises(vlkv.InputError, match=message):
        config_from_hf(raw)


def test_marks_around_pictures_are_text(case):
    inputs = case.inputs(prompts())
    assert not inputs.is_vision[inputs.tokens == START].any()
    assert (inputs.grid[~inputs.is_vision] == -1).all()
    assert (inputs.tokens[0][inputs.is_vision[0]] == IMAGE).all()
