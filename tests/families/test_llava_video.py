"""What is special about LLaVA-Video in its original form. `test_every_family.py` has the rest."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.families.common_llava import GRID, IMAGE, ONEVISION_PINPOINTS, VIDEO_RAW, WIDER, video_features
from tests.parity.conftest import torch
from tests.processing.conftest import make_tokenizer
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.llava_next.inputs import Views
from vlkv.processing import Processor, Video


def test_the_grid_of_a_video(saved):
    inputs = saved("llava_video_frames").inputs()
    grid = [[t, y, x] if x < 2 else [t, -1, -1] for t in range(3) for y in range(2) for x in range(3)]
    assert inputs.grid[0, 2:20].tolist() == grid


@pytest.mark.parametrize("mode", ["bilinear", "average"])
@pytest.mark.parametrize("newline", ["grid", "frame", "one_token", "no_token"])
def test_every_arrangement_of_frames(saved, newline, mode):
    """The sums that the layout asks for, of the projected patches, are the reference's embeddings."""
    model = saved("llava_video").model
    raw = {**VIDEO_RAW, "mm_newline_position": newline, "mm_spatial_pool_mode": mode}
    config = config_from_hf(raw)
    frames = np.random.default_rng(3).normal(size=(2, 3, WIDER, WIDER)).astype(np.float32)
    count = len(Views(config).video(2))
    inputs = vlkv.Inputs.from_hf({"input_ids": [[IMAGE] * count], "pixel_values_videos": [frames]}, config)
    net = model.model
    with torch.no_grad():
        wanted = video_features(model, torch.tensor(frames), newline, mode).numpy()
        tower = net.vision_tower(torch.tensor(inputs.pixels), output_hidden_states=True)
        patches = net.multi_modal_projector(tower.hidden_states[-1]).flatten(0, 1).numpy()
    mixed = (patches[inputs.layout["taps"]] * inputs.layout["weights"][..., None]).sum(axis=1)
    embeddings = np.concatenate([patches, mixed, net.image_newline.detach().numpy()[None]])
    assert len(wanted) == count
    np.testing.assert_allclose(embeddings[inputs.vision_index[0, :count]], wanted, atol=1e-4)


def test_processor_of_an_original_folder(saved, tmp_path):
    """No image settings: SigLIP's own. One token for a picture and a video."""
    config = config_from_hf({**VIDEO_RAW, "vocab_size": 300, "image_token_index": 3})
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    processor = Processor.from_folder(tmp_path, config)
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3)).astype(np.uint8))
    inputs = processor(Video(frames=[image, image]), "<video>What is seen?")
    assert inputs.is_vision.sum() == 2 * 2 * 3
    frame = np.asarray(image.resize((WIDER, WIDER), resample=PIL.Image.Resampling.BICUBIC), np.float32)
    np.testing.assert_allclose(inputs.pixels[1], frame.transpose(2, 0, 1) / 127.5 - 1, atol=1e-5)
    pair = processor([[image, image], [image], []], ["Which?", "Where?", "Why?"])
    alone = len(Views(config).picture((40, 30)))
    assert pair.is_vision.sum(axis=1).tolist() == [2 * (GRID**2 + 1), alone, 0]
    with pytest.raises(InputError, match="same token"):
        processor([image, Video(frames=[image])], ["Which?", "Where?"])


def test_published_counts_and_settings():
    """210 tokens a frame; pinpoints as a range or as pairs (width, height)."""
    raw = {**VIDEO_RAW, "mm_vision_tower": "google/siglip-so400m-patch14-384", "vision_config": {"model_type": "clip"},
           "image_aspect_ratio": "anyres_max_9", "image_grid_pinpoints": [[768, 384], [384, 384]]}  # fmt: skip
    config = config_from_hf(raw)
    assert len(Views(config).video(64)) == 64 * 210
    assert config.wiring.pinpoints == ((384, 768), (384, 384))
    assert config.stop == (2,)
    tiny = config_from_hf(VIDEO_RAW).wiring.pinpoints
    assert sorted(tiny) == sorted(map(tuple, ONEVISION_PINPOINTS))


@pytest.mark.parametrize(
    "change",
    [
        {"mm_newline_position": "before"}, {"mm_spatial_pool_mode": "max"}, {"mm_projector_type": "linear"},
        {"mm_patch_merge_type": "flat"}, {"add_faster_video": True}, {"image_aspect_ratio": "pad"},
        {"image_grid_pinpoints": "all"}, {"mm_vision_tower": "some/other", "vision_config": {}},
    ],
)  # fmt: skip
def test_settings_that_are_refused(change):
    with pytest.raises(InputError, match=next(iter(change))):
        config_from_hf({**VIDEO_RAW, **change})
