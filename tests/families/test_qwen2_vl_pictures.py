"""Limits, videos and prompts of Qwen2-VL and Qwen2.5-VL; `tests/processing/test_every_processor.py` has images."""

import json

import numpy as np
import PIL.Image
import pytest

from tests.processing.conftest import make_tokenizer, noise, tiny_config, write_files
from vlkv.errors import InputError
from vlkv.processing import Processor, Video

SPECIAL = {"<|image_pad|>": 3, "<|video_pad|>": 260}
# The shape of the published template.
TEMPLATE = """\
{% for message in messages %}
{{- '<|' + message['role'] + '|>' }}
{%- for content in message['content'] %}
{%- if content['type'] == 'image' %}{{ '[<|image_pad|>]' }}
{%- elif content['type'] == 'video' %}{{ '[<|video_pad|>]' }}
{%- elif 'text' in content %}{{ content['text'] }}
{%- endif %}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 100352, "patch_size": 14,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


CONFIG = tiny_config("qwen2_vl", image_token_id=3, video_token_id=260, vision_config=dict(hidden_size=32))


def write_folder(folder, settings=SETTINGS):
    tokenizer = make_tokenizer("<|image_pad|>", bos=False)
    tokenizer.add_special_tokens(["<|video_pad|>"])
    return write_files(folder, tokenizer, tokenizer_config={"eos_token": "</s>"}, preprocessor_config=settings,
                       chat_template=TEMPLATE)  # fmt: skip


@pytest.fixture
def processor(tmp_path):
    return Processor.from_folder(write_folder(tmp_path), CONFIG)


K = 28 * 28
SIZES = [
    {}, {"min_pixels": 4 * K, "max_pixels": 64 * K}, {"min_pixels": 40 * K}, {"max_pixels": 64 * K},
    {"size": {"shortest_edge": 4 * K, "longest_edge": 64 * K}}, {"size": {"min_pixels": 4 * K, "max_pixels": 64 * K}},
    {"size": {"shortest_edge": 4 * K, "longest_edge": 64 * K}, "max_pixels": 16 * K},
    {"size": {"min_pixels": 1, "max_pixels": 2}, "min_pixels": 4 * K, "max_pixels": 64 * K},
    {"size": None, "min_pixels": 40 * K, "max_pixels": None}, {"size": {"longest_edge": 64 * K}},
    {"size": {"shortest_edge": 4 * K}}, {"size": {"longest_edge": 64 * K}, "min_pixels": 4 * K},
    {"size": {"height": 56, "width": 56}}, {"size": {"height": 56, "width": 56}, "min_pixels": K, "max_pixels": K},
    {"size": {}}, {"size": {"shortest_edge": 4 * K, "longest_edge": None}}, {"max_pixels": 50176.0},
]  # fmt: skip


@pytest.mark.parametrize("raw", SIZES, ids=str)
def test_every_spelling_of_the_limits_is_that_of_transformers_or_refused(tmp_path, raw):
    theirs = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").Qwen2VLImageProcessorPil
    pictures = [noise(640, 480), noise(20, 33), noise(150, 100)]
    settings = {key: value for key, value in SETTINGS.items() if "pixels" not in key} | raw
    try:
        wanted = [theirs(**raw)(one, return_tensors="np")["image_grid_thw"][0].tolist() for one in pictures]
    except (TypeError, ValueError):
        with pytest.raises(InputError, match=r"shortest_edge and longest_edge|must be positive numbers"):
            CONFIG.open_pictures(write_folder(tmp_path, settings), "checkpoint")
        return
    ours = CONFIG.open_pictures(write_folder(tmp_path, settings), "checkpoint")
    assert [ours.read(one).arrays["image_grid_thw"].tolist() for one in pictures] == wanted


def test_the_first_name_of_the_image_processor(tmp_path):
    settings = SETTINGS | {"image_processor_type": "Qwen2_5_VLImageProcessor"}
    CONFIG.open_pictures(write_folder(tmp_path, settings), "checkpoint")
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": "Qwen2VLImageProcessor"}))
    with pytest.raises(InputError, match="must be an object"):
        CONFIG.open_pictures(tmp_path, "checkpoint")


def test_frames_of_a_video_are_patches_in_pairs(processor):
    """Frame by frame as an image of that size; an odd last one is repeated; then taken apart by hand."""
    frames = [noise(400, 200, seed) for seed in range(5)]
    read = processor.pictures.read(Video(frames=frames, fps=4.0))
    time, lines, columns = read.arrays["video_grid_thw"]
    assert (time, lines % 2, columns % 2, read.tokens) == (3, 0, 0, 3 * lines * columns // 4)
    assert read.arrays["second_per_grid_ts"] == 0.5
    mean, std = (np.array(SETTINGS[f"image_{name}"]) for name in ("mean", "std"))
    patches = read.arrays["pixel_values_videos"].reshape(3, lines // 2, columns // 2, 2, 2, 3, 2, 14, 14)
    for number, frame in enumerate([*frames, frames[-1]]):
        resized = np.asarray(frame.resize((columns * 14, lines * 14), PIL.Image.Resampling.BICUBIC))
        wanted = (resized / 255 - mean) / std
        for line, column in ((0, 0), (3, 4), (lines - 1, columns - 1)):
            block = wanted[14 * line : 14 * line + 14, 14 * column : 14 * column + 14].transpose(2, 0, 1)
            ours = patches[number // 2, line // 2, column // 2, line % 2, column % 2, :, number % 2]
            np.testing.assert_allclose(ours, block, atol=1e-5)


def test_a_prompt_with_images_and_a_video(processor):
    video = Video(frames=[noise(56, 84, seed) for seed in range(4)], fps=4.0)
    assert processor.pictures.read(video).arrays["second_per_grid_ts"] == 0.5
    images = [noise(60, 90), noise(120, 57)]
    inputs = processor([[images[0], video, images[1]], []], ["one <image> two <video> three <image>?", "none"])
    counts = [processor.pictures.read(one).tokens for one in (images[0], video, images[1])]
    ids = inputs.tokens[0][inputs.valid[0]]
    runs = np.flatnonzero(np.diff(np.concatenate([[0], np.isin(ids, list(SPECIAL.values())).astype(int), [0]])))
    assert np.diff(runs)[::2].tolist() == counts
    assert [int(ids[start]) for start in runs[::2]] == [3, 260, 3]
    text = processor.decode(ids)
    assert text == "<|user|>one [] two [] three []?<|assistant|>"
    assert not inputs.is_vision[1].any()
    frames = inputs.grid[0][inputs.is_vision[0], 0]
    assert frames.max() == 3, "two images and two pairs of frames"


@pytest.mark.parametrize(("file", "content"), [
    ("video_preprocessor_config.json", {"size": {"shortest_edge": 4000, "longest_edge": 9000}}),
    ("processor_config.json", {"video_processor": {"min_pixels": 4000, "max_pixels": 9000}}),
])  # fmt: skip
def test_bounds_of_videos_may_be_in_another_file(tmp_path, file, content):
    write_folder(tmp_path, {key: value for key, value in SETTINGS.items() if "pixels" not in key})
    (tmp_path / file).write_text(json.dumps(content))
    made = CONFIG.open_pictures(tmp_path, "checkpoint")
    assert (made.settings["video"].least, made.settings["video"].most) == (4000, 9000)
    assert (made.settings["image"].least, made.settings["image"].most) == (3136, 1003520)
