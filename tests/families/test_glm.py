"""What is special about GLM-4.1V, GLM-4.6V and GLM-OCR; `test_every_family.py` has the rest."""

import jax
import numpy as np
import pytest

import vlkv
from tests.families import common_glm
from tests.families.common import Refused, check_refused, forward, joined
from tests.families.common_glm import make_rows
from tests.parity.conftest import torch, transformers
from vlkv.towers.native import cubic_weights

MIXED = (2, ("image", 1, 4, 2), 1, ("video", 2, 2, 4), 3, ("image", 1, 2, 2), 4)

KINDS = ("glm4v", "glm_ocr")


def test_each_frame_of_a_video_is_an_image_to_a_policy(saved):
    assert saved("glm4v").inputs().grid[1, :, 0].max() == 2


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_images_and_a_video_in_one_prompt(saved, kind):
    model, _, params, _ = saved(kind)
    row = make_rows((MIXED,))[0]
    inputs = vlkv.Inputs.from_hf(joined([row]), params.config)
    logits, positions = common_glm.mixed(model, row)
    np.testing.assert_array_equal(inputs.positions[0, : len(row.ids)], positions)
    ours = np.asarray(forward(params, inputs))[0, : len(row.ids)]
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    assert logits.std() >= 1


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


def test_a_layer_that_predicts_further_tokens_is_known_in_one_kind(saved, tmp_path):
    common_glm.further(saved("glm4v"), tmp_path / "glm4v")
    with pytest.raises(vlkv.InputError, match=r"layers\.2"):
        vlkv.load_params(tmp_path / "glm4v")


def test_models_with_experts_are_refused_by_name():
    check_refused(transformers.Glm4vMoeConfig().to_dict(), Refused(None, {}, r"GLM-4\.6V-Flash is supported"))


def test_a_video_without_its_marks_is_an_image_without_pixels(saved):
    batch = joined(make_rows(((2, ("video", 1, 4, 6), 3),)))
    batch["input_ids"] = np.where(batch["input_ids"] == common_glm.VIDEO_START, 5, batch["input_ids"])
    with pytest.raises(vlkv.InputError, match="the image tokens do not fit the images or videos"):
        vlkv.Inputs.from_hf(batch, saved("glm4v").params.config)
