"""What is special about LLaVA-OneVision: views of pictures, frames. `test_every_family.py` has the rest."""

from __future__ import annotations

import json

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.families.common_llava import IMAGE, ONEVISION_PINPOINTS, WIDER, onevision_tiles
from tests.parity.conftest import torch
from tests.processing.conftest import make_tokenizer, write_folder
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.llava_next.inputs import Views
from vlkv.processing import Processor, Video


def test_taps_of_the_resized_picture(saved):
    assert saved("llava_onevision").inputs().layout["taps"].shape == (64, 4)


def test_grid_by_hand(saved):
    inputs = saved("llava_onevision").inputs()
    square = [[y, x] for y in range(3) for x in range(3)]
    assert inputs.grid[1][inputs.is_vision[1]].tolist() == [
        *([0, *place] for place in square), [0, -1, -1], *([1, *place] for place in square), [1, -1, -1]
    ]  # fmt: skip
    frames = [[frame, y, x] for frame in range(3) for y in range(2) for x in range(2)]
    assert inputs.grid[3][inputs.is_vision[3]].tolist() == [*frames, [2, -1, -1]]
    # 60 x 50 pixels show on 9 x 7 of 9 x 9 patches, the root of 63 / 18 times too many a side: 4 x 3 are left.
    assert inputs.grid[0][inputs.is_vision[0]][9:].tolist() == [
        [1, y, x] if x < 3 else [1, -1, -1] for y in range(4) for x in range(4)
    ]
    assert inputs.max_images == 3


def processors():
    pil = pytest.importorskip("transformers.models.llava_onevision.image_processing_pil_llava_onevision")
    raw = dict(image_processor_type="LlavaOnevisionImageProcessor", size={"height": WIDER, "width": WIDER},
               image_grid_pinpoints=ONEVISION_PINPOINTS, image_mean=[0.5] * 3, image_std=[0.5] * 3)  # fmt: skip
    return pil.LlavaOnevisionImageProcessorPil(**raw), raw


def test_sizes_and_pixels_are_those_of_the_pil_processor(saved, tmp_path):
    """Counts of 200 sizes, and the layout and the pixels of some, alone and among others."""
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    model, _, params, _ = saved("llava_onevision")
    reference, raw = processors()
    counter = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    counter.image_processor, counter.num_image_tokens, counter.vision_aspect_ratio = reference, 9, "anyres_max_2"
    rng = np.random.default_rng(1)
    sizes = [tuple(map(int, size)) for size in np.exp(rng.uniform(0, 6, (192, 2))).astype(int)]
    sizes += [(1, 400), (400, 1), (22, 22), (66, 66), (67, 67), (44, 23), (23, 44), (1, 1)]
    ours = [len(Views(params.config).picture(size)) for size in sizes]
    assert ours == [counter._get_number_of_features(*size, WIDER, WIDER) for size in sizes]

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(raw))
    pictures = params.config.open_pictures(tmp_path, "checkpoint")
    for size in sizes[:6] + sizes[-6:]:
        image = PIL.Image.fromarray(rng.integers(0, 256, (*size, 3)).astype(np.uint8))
        for images in (1, 2):
            read = pictures.read(image, images=images)
            wanted = reference([[image] * images], return_tensors="np")
            assert read.arrays["image_sizes"].tolist() == wanted["image_sizes"][0].tolist() == list(size)
            np.testing.assert_allclose(read.arrays["pixel_values"], wanted["pixel_values"][0], atol=1e-5, rtol=0)
            check_layout(model, params.config, size, images, read.tokens)
    video = pictures.read(Video(frames=[image, image]))
    assert video.tokens == 2 * 4 + 1
    np.testing.assert_allclose(video.arrays["pixel_values_videos"][0], pictures.read(image).arrays["pixel_values"][0])


TEMPLATE = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>' }}
{%- for item in message['content'] if item['type'] != 'text' %}{{ '<' + item['type'] + '>' }}{% endfor %}
{%- for item in message['content'] if item['type'] == 'text' %}{{ item['text'] }}{% endfor %}
{% endfor %}
"""


def test_processor_of_a_folder(saved, tmp_path):
    """How many pictures a prompt has decides what becomes of each; videos of unequal length share a batch."""
    folder = write_folder(tmp_path, template=TEMPLATE)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<video>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"image_processor": processors()[1], "video_processor": {
        "video_processor_type": "LlavaOnevisionVideoProcessor", "size": {"height": WIDER, "width": WIDER},
    }}  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(settings))
    raw = saved("llava_onevision").model.config.to_dict()
    raw["text_config"]["vocab_size"] = 300
    raw |= {"image_token_index": 3, "video_token_index": tokenizer.token_to_id("<video>")}
    config = config_from_hf(raw)
    processor = Processor.from_folder(folder, config)
    image = PIL.Image.new("RGB", (50, 60), (255, 0, 0))
    videos = [Video(frames=[image] * frames) for frames in (1, 3)]
    inputs = processor([[image, image], image, [videos[0], image], videos[1], None], ["What is it?"] * 5)
    alone, among = len(Views(config).picture((60, 50))), 10
    wanted = [2 * among, alone, 4 + 1 + alone, 12 + 1, 0]
    assert inputs.is_vision.sum(axis=1).tolist() == wanted
    assert inputs.grid[2, :, 0].max() == 2, "two views of the picture and a frame"
    numbers = [row[row >= 0].tolist() for row in inputs.frame]
    assert numbers == [[], [], [0] * 5, [0] * 4 + [1] * 4 + [2] * 5, []], "with the newline at the end"


def check_layout(model, config, size, images, count) -> None:
    """transformers' own packing of known patches, against the weighted sums that the layout asks for."""
    number = onevision_tiles(size) if images == 1 else 1
    patches = torch.tensor(np.random.default_rng(0).normal(size=(number, 9, 2)))
    packed, _ = model.model.pack_image_features(
        [patches] * images, [list(size)] * images, torch.tensor([50.0, 60.0]), "anyres_max_2"
    )
    pixels = np.zeros((images, number, 3, WIDER, WIDER), np.float32)
    batch = {"input_ids": [[IMAGE] * (count * images)], "pixel_values": pixels, "image_sizes": [size] * images,
             "batch_num_images": [images]}  # fmt: skip
    inputs = vlkv.Inputs.from_hf(batch, config)
    rows = np.zeros((inputs.pixels.shape[0] * 9, 2))
    rows[: images * number * 9] = np.concatenate([patches.reshape(-1, 2).numpy()] * images)
    mixed = (rows[inputs.layout["taps"]] * inputs.layout["weights"][..., None]).sum(axis=1)
    rows = np.concatenate([rows, mixed, [[50.0, 60.0]]])
    ours = rows[inputs.vision_index[0, : count * images]]
    np.testing.assert_allclose(ours, np.concatenate([one.numpy() for one in packed]), atol=1e-5)


def test_published_counts():
    """With the published settings 640 x 480 pixels make 2929 tokens, and a frame 196."""
    config = config_from_hf({"model_type": "llava_onevision"})
    assert len(Views(config).picture((480, 640))) == 2929
    assert len(Views(config).picture((480, 640), alone=False)) == 730
    assert len(Views(config).video(8)) == 8 * 196 + 1
    assert config.vision.width == 1152


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
        ({"vision_aspect_ratio": "square"}, "vision_aspect_ratio"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type"),
        ({"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act"),
    ],
)
def test_settings_that_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        config_from_hf({"model_type": "llava_onevision", **change})
