"""InternVL2.5, 3 and 3.5 in transformers' form: the network against transformers."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.families.common import check_files, check_refused, joined, raw_of, save
from tests.families.common_internvl import (
    LARGE_VIT,
    SIDES,
    SMALL_VIT,
    TOKENS,
    check_forward,
    check_generate,
    make_internvl,
    make_rows,
)
from tests.parity.conftest import torch
from vlkv import policies
from vlkv.errors import InputError


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    return save(make_internvl("qwen2", SMALL_VIT), tmp_path_factory.mktemp("internvl"), make_rows())


@pytest.fixture(scope="module")
def batch(internvl):
    return joined(internvl[3], SIDES)


def test_logits_and_layers_of_unequal_rows(internvl):
    model, _, params, rows = internvl
    check_forward(model, params, rows)


@pytest.mark.full
def test_greedy_tokens(internvl):
    model, _, params, rows = internvl
    check_generate(model, params, rows)


def test_a_large_tower_and_an_inner_feature_layer(tmp_path):
    """RMSNorm, queries and keys normalised over all heads, no biases; a Llama decoder with a tied head."""
    model, _, params, rows = save(make_internvl("llama", LARGE_VIT, tied=True, layer=-2), tmp_path, make_rows())
    assert len(params.vision.blocks) == 2
    check_forward(model, params, rows)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "vision"),
    [("qwen3", SMALL_VIT), ("qwen3", LARGE_VIT), ("qwen3_moe", SMALL_VIT)],
    ids=["qwen3-300M", "qwen3-6B", "qwen3_moe"],
)
def test_internvl3_5(tmp_path, kind, vision):
    """Qwen3, dense or with experts, after either tower."""
    model, _, params, rows = save(make_internvl(kind, vision, seed=2), tmp_path, make_rows())
    assert params.config.decoder.qk_norm and not params.config.decoder.tied
    check_forward(model, params, rows)
    check_generate(model, params, rows)


def test_every_name_on_disk_gives_the_same_parameters(internvl, tmp_path):
    internvl[0].save_pretrained(tmp_path / "new", save_original_format=False)
    check_files(internvl, tmp_path, "new")


@pytest.mark.full
@pytest.mark.parametrize(
    "policy",
    [
        policies.SnapKV(keep=0.3, window=4),
        policies.H2O(keep=0.3),
        policies.LightKV(layers=(1,), windows=(2,), rho=0.5),
        policies.FasterVLM(keep=0.5),
    ],
    ids=["score", "step", "reduce", "tower"],
)
def test_a_policy_of_each_stage(internvl, policy):
    """Rows of unequal length, in any order: what a row answers is its own business."""
    _, _, params, rows = internvl
    generate = programs.generate
    before, outputs = generate._cache_size(), {}
    for order in ((0, 1, 2), (2, 0, 1)):
        batch = joined([rows[row] for row in order], [SIDES[row] for row in order])
        inputs = vlkv.Inputs.from_hf(batch, params.config)
        output = generate(params, inputs, policy=policy, sampling=vlkv.Greedy(max_new_tokens=6, stop=()))
        length = output.kept.sum(axis=(0, 2, 3))
        for place, row in enumerate(order):
            assert 0 < length[place] < 4 * inputs.valid[place].sum() or row == 2  # 2 layers, 2 key heads
            outputs.setdefault(row, []).append((np.asarray(output.tokens[place]).tolist(), length[place]))
    assert generate._cache_size() == before + 1
    for first, second in outputs.values():
        assert first == second


def test_what_the_class_token_gives_to_each_vision_token(internvl, batch):
    """The sum over its four patches, in the tower's last block, against transformers' attention."""
    model, _, params, _ = internvl
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    ours = jax.jit(lambda params, inputs: params.embed(inputs, (-1,)).attention)(params, inputs)
    pixels = torch.tensor(np.array(batch["pixel_values"]))
    tower = copy.deepcopy(model.model.vision_tower)
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = tower(pixels, output_attentions=True).attentions[-1][:, :, 0, 1:]
    theirs = theirs.numpy().reshape(5, 2, 4, 2, 4, 2).sum(axis=(3, 5)).reshape(5, 2, TOKENS)
    first = inputs.is_vision[0]
    wanted = np.concatenate(theirs[:4], axis=-1)
    np.testing.assert_allclose(np.asarray(ours)[0, 0][:, first], wanted, atol=1e-5)
    assert (np.asarray(ours)[0, 0][:, ~first] == 0).all()


def test_the_grid_of_a_batch(internvl, batch):
    """Every tile is an image of its own, in raster order; marks and text lie on no grid."""
    inputs = vlkv.Inputs.from_hf(batch, internvl[2].config)
    assert inputs.pixels.shape[0] == 6
    assert (inputs.max_images, inputs.max_vision) == (4, 64)
    assert inputs.is_vision.sum(axis=1).tolist() == [4 * TOKENS, TOKENS, 0]
    tiles = inputs.grid[0][inputs.is_vision[0]]
    wanted = [(tile, line, column) for tile in range(4) for line in range(4) for column in range(4)]
    np.testing.assert_array_equal(tiles, wanted)
    assert (inputs.grid[~inputs.is_vision] == -1).all()
    np.testing.assert_array_equal(inputs.vision_index[inputs.is_vision], np.arange(5 * TOKENS))


def test_tiles_and_the_places_of_the_thumbnail_that_they_show(internvl, batch):
    """Three tiles side by side, of which the first shows the first two columns; the second picture is one tile."""
    pixel_tiles = [[0, 0], [0, 0], [0, 0], [1, 3], [0, 0]]
    inputs = vlkv.Inputs.from_hf({**batch, "pixel_tiles": pixel_tiles}, internvl[2].config)
    first, second = (inputs.tiles[row][inputs.is_vision[row]] for row in range(2))
    np.testing.assert_array_equal(first[:, 0], np.repeat(range(4), TOKENS))
    assert (first[: 3 * TOKENS, 1] == -1).all()
    np.testing.assert_array_equal(first[3 * TOKENS :, 1], [0, 0, 1, 2] * 4)
    np.testing.assert_array_equal(second, [[0, -1]] * TOKENS)
    assert (inputs.tiles[~inputs.is_vision] == -1).all()


def test_tiles_that_do_not_match_are_refused(internvl, batch):
    config, pixels = internvl[2].config, np.array(batch["pixel_values"])
    with pytest.raises(InputError, match=r"80 image tokens, but 4 image\(s\) or tile\(s\) of 16"):
        vlkv.Inputs.from_hf({**batch, "pixel_values": pixels[:4]}, config)
    with pytest.raises(InputError, match="expected \\[images, 3, 56, 56\\]"):
        vlkv.Inputs.from_hf({**batch, "pixel_values": pixels[:, :, :28]}, config)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("vision_config", "use_mean_pooling", False),
        ("vision_config", "use_absolute_position_embeddings", False),
        ("vision_config", "hidden_act", "quick_gelu"),
        ("vision_config", "norm_type", "group_norm"),
        ("vision_config", "image_size", [56, 28]),
        (None, "downsample_ratio", 0.3),
        (None, "projector_hidden_act", "relu"),
        (None, "vision_feature_select_strategy", "full"),
        (None, "vision_feature_layer", [-1, -2]),
        ("text_config", "model_type", "gemma"),
        ("text_config", "model_type", "gpt_oss"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(internvl, part, field, value):
    check_refused(raw_of(internvl[1]), {field: value}, field, part)
