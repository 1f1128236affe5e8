"""What is special about LLaVA-NeXT: views of a picture. `test_every_family.py` has the rest."""

from __future__ import annotations

import json

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.families.common import check_neighbours
from tests.families.common_llava import IMAGE, NEXT_PINPOINTS, PATCH, SIDE, next_tiles
from tests.parity.conftest import torch
from vlkv import policies
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.llava_next.inputs import Views
from vlkv.processing import Video


@pytest.mark.full
def test_a_row_is_answered_alike_by_a_policy_of_the_tower(saved):
    check_neighbours(saved("llava_next"), policies.HiRED(keep=0.5))


def test_grid_by_hand(saved):
    """56 x 56 shows a 30 x 50 picture at its best: of 8 x 8 patches the first and last two lines are padding."""
    inputs = saved("llava_next").inputs()
    grid, vision = inputs.grid[0], inputs.is_vision[0]
    assert vision.sum() == 16 + 4 * (8 + 1)
    own = grid[vision]
    assert own[:16].tolist() == [[0, y, x] for y in range(4) for x in range(4)]
    assert own[16:].tolist() == [[1, y, x] if x < 8 else [1, -1, -1] for y in range(4) for x in range(9)]
    index = inputs.vision_index[0][vision][16:].reshape(4, 9)
    newline = inputs.pixels.shape[0] * 16
    assert index[0].tolist() == [24, 25, 26, 27, 40, 41, 42, 43, newline], "the third line of the upper two tiles"
    assert index[2].tolist() == [48, 49, 50, 51, 64, 65, 66, 67, newline], "the first line of the lower two"
    assert inputs.max_images == 4


def processors(pinpoints=NEXT_PINPOINTS, side=SIDE):
    pil = pytest.importorskip("transformers.models.llava_next.image_processing_pil_llava_next")
    raw = dict(image_processor_type="LlavaNextImageProcessor", size={"shortest_edge": side},
               crop_size={"height": side, "width": side}, image_grid_pinpoints=pinpoints)  # fmt: skip
    return pil.LlavaNextImageProcessorPil(**raw), raw


def test_sizes_and_pixels_are_those_of_the_pil_processor(saved, tmp_path):
    """Counts of 200 sizes, and the layout and the pixels of some."""
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    model, _, params, _ = saved("llava_next")
    reference, raw = processors()
    counter = LlavaNextProcessor.__new__(LlavaNextProcessor)
    counter.image_processor, counter.patch_size, counter.num_additional_image_tokens = reference, PATCH, 0
    rng = np.random.default_rng(1)
    sizes = [tuple(map(int, size)) for size in np.exp(rng.uniform(0, 6, (190, 2))).astype(int)]
    sizes += [(1, 400), (400, 1), (28, 56), (56, 56), (57, 57), (333, 24), (24, 333), (1, 1), (84, 27), (112, 112)]
    ours = [len(Views(params.config).picture(size)) for size in sizes]
    assert ours == [counter._get_number_of_features(*size, SIDE, SIDE) for size in sizes]

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(raw))
    pictures = params.config.open_pictures(tmp_path, "checkpoint")
    for size in sizes[:6] + sizes[-6:]:
        image = PIL.Image.fromarray(rng.integers(0, 256, (*size, 3)).astype(np.uint8))
        read = pictures.read(image)
        wanted = reference(image, return_tensors="np")
        assert read.arrays["image_sizes"].tolist() == wanted["image_sizes"][0].tolist() == list(size)
        np.testing.assert_allclose(read.arrays["pixel_values"], wanted["pixel_values"][0], atol=1e-5, rtol=0)
        check_layout(model, params.config, size, read.tokens)


def check_layout(model, config, size, count) -> None:
    """transformers' own packing of numbered patches says which patch stands where; -1 is the newline."""
    patches = torch.arange(next_tiles(size) * 16.0).reshape(next_tiles(size), 16, 1)
    packed, _ = model.model.pack_image_features([patches], [list(size)], "default", torch.tensor([-1.0]))
    pixels = np.zeros((1, next_tiles(size), 3, SIDE, SIDE), np.float32)
    batch = {"input_ids": [[IMAGE] * count], "pixel_values": pixels, "image_sizes": [size]}
    inputs = vlkv.Inputs.from_hf(batch, config)
    index = inputs.vision_index[0, :count]
    newline = inputs.pixels.shape[0] * 16
    np.testing.assert_array_equal(np.where(index == newline, -1, index), packed[0][:, 0].numpy())
    assert (inputs.grid[0, :count, 1] == -1).sum() == (index == newline).sum()


def test_published_count():
    """640 x 480 pixels make 2340 tokens with the published settings (see the config of llava-v1.6)."""
    raw = {"model_type": "llava_next", "text_config": {"model_type": "llama"}}
    config = config_from_hf(raw)
    assert len(Views(config).picture((480, 640))) == 2340


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({"image_grid_pinpoints": [[336, 500]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [336]}, "image_grid_pinpoints"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
        ({"use_image_newline_parameter": False}, "use_image_newline_parameter"),
        ({"model_type": "llava_next_video", "spatial_pool_mode": "conv"}, "spatial_pool_mode"),
    ],
)
def test_settings_that_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        config_from_hf({"model_type": "llava_next", **change})


def test_folders_that_are_refused(saved, tmp_path):
    config = saved("llava_next").params.config
    _, raw = processors()
    image = PIL.Image.new("RGB", (40, 40))
    for change, message in [
        ({"image_grid_pinpoints": [[28, 28]]}, "different checkpoints"),
        ({"size": {"shortest_edge": 14}, "crop_size": 14}, "makes 14 x 14 pixels"),
    ]:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**raw, **change}))
        with pytest.raises(InputError, match=message):
            config.open_pictures(tmp_path, "checkpoint").read(image)
    with pytest.raises(InputError, match="layout='pad'"):
        config.open_pictures(tmp_path, "pad")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="does not support videos"):
        config.open_pictures(tmp_path, "checkpoint").read(Video(frames=[image]))
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match=r"preprocessor_config\.json: no such file"):
        config.open_pictures(tmp_path, "checkpoint")
