"""Views of a picture and frames of a video: LLaVA-NeXT, LLaVA-OneVision and LLaVA-Video; not the networks."""

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.families.common_llava import (
    GRID,
    IMAGE,
    VIDEO_RAW,
    WIDER,
    next_tiles,
    onevision_tiles,
    video_features,
)
from tests.parity.conftest import torch
from tests.processing.conftest import make_tokenizer
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.llava_next.inputs import Views
from vlkv.processing import Processor, Video

SIZES = [(30, 50), (90, 21), (61, 60), (7, 400), (400, 9), (1, 1), (56, 56), (57, 57), (333, 24), (9, 30)]


@pytest.mark.parametrize(("name", "images"), [("llava_next", 1), ("llava_onevision", 1), ("llava_onevision", 2)])
def test_layouts_of_pictures_alone_and_among_others(saved, name, images):
    model, _, params, _ = saved(name)
    for size in SIZES:
        check_layout(model, params.config, size, images, len(Views(params.config).picture(size, alone=images == 1)))


def check_layout(model, config, size, images, count) -> None:
    """transformers' own packing of known patches, against the weighted sums that the layout asks for."""
    plain = config.family == "llava_next"
    number = (next_tiles if plain else onevision_tiles)(size) if images == 1 else 1
    patches = torch.tensor(np.random.default_rng(0).normal(size=(number, 16 if plain else 9, 2)))
    options = ("default",) if plain else (torch.tensor([50.0, 60.0]), "anyres_max_2")
    if plain:
        options += (torch.tensor([50.0, 60.0]),)
    packed, _ = model.model.pack_image_features([patches] * images, [list(size)] * images, *options)
    side = config.vision.image_size
    batch = {"input_ids": [[IMAGE] * (count * images)], "pixel_values": np.zeros((images, number, 3, side, side)),
             "image_sizes": [size] * images, "batch_num_images": [images]}  # fmt: skip
    inputs = vlkv.Inputs.from_hf(batch, config)
    rows = np.zeros((inputs.pixels.shape[0] * patches.shape[1], 2))
    known = np.concatenate([patches.reshape(-1, 2).numpy()] * images)
    rows[: len(known)] = known
    mixed = rows[:0]
    if "taps" in inputs.layout:
        mixed = (rows[inputs.layout["taps"]] * inputs.layout["weights"][..., None]).sum(axis=1)
    ours = np.concatenate([rows, mixed, [[50.0, 60.0]]])[inputs.vision_index[0, : count * images]]
    np.testing.assert_allclose(ours, np.concatenate([one.numpy() for one in packed]), atol=1e-5)


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


def test_published_counts():
    plain = config_from_hf({"model_type": "llava_next", "text_config": {"model_type": "llama"}})
    assert len(Views(plain).picture((480, 640))) == 2340
    config = config_from_hf({"model_type": "llava_onevision"})
    assert len(Views(config).picture((480, 640))) == 2929
    assert len(Views(config).picture((480, 640), alone=False)) == 730
    assert len(Views(config).video(8)) == 8 * 196 + 1
    assert config.vision.width == 1152
