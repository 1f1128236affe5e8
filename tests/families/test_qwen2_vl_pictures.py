"""Pictures of Qwen2-VL and Qwen2.5-VL: sizes, patches and prompts against transformers' PIL processor."""

from __future__ import annotations

import json
import re

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.processing.conftest import make_tokenizer
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.processing import Processor, Video

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
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


def config_of(family):
    text = dict(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]})  # fmt: skip
    vision = {"out_hidden_size": 16} if family == "qwen2_5_vl" else {"hidden_size": 16}
    return config_from_hf(
        {**text, "model_type": family, "vision_config": vision, "image_token_id": 3, "video_token_id": 260}
    )


@pytest.fixture(scope="module", params=FAMILIES)
def config(request):
    return config_of(request.param)


def write_folder(folder, settings=SETTINGS):
    tokenizer = make_tokenizer("<|image_pad|>", bos=False)
    tokenizer.add_special_tokens(["<|video_pad|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert all(tokenizer.token_to_id(name) == token for name, token in SPECIAL.items())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def processor(tmp_path, config):
    return Processor.from_folder(write_folder(tmp_path), config)


def picture(width, height, seed=0):
    array = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    return PIL.Image.fromarray(array)


@pytest.mark.parametrize("bounds", [(3136, 12845056), (50176, 100352)])
def test_sizes_are_those_of_transformers(tmp_path, config, bounds):
    """200 random ones, some far from square, and every even multiple of half a token: rounding goes to even."""
    theirs = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    least, most = bounds
    settings = {**SETTINGS, "min_pixels": least, "max_pixels": most}
    ours = config.open_pictures(write_folder(tmp_path, settings), "checkpoint").settings["image"]
    rng = np.random.default_rng(0)
    sizes = [tuple(int(side) for side in np.exp(rng.uniform(2.5, 8, 2))) for _ in range(200)]
    for height, width in [*sizes, *((14 * i, 14 * j) for i in range(1, 20) for j in (1, 2, 7, 11))]:
        wanted = theirs.smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most)
        assert ours.scaled(height, width, 28) == wanted


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
    pictures = [picture(640, 480), picture(20, 33), picture(150, 100)]
    settings = {key: value for key, value in SETTINGS.items() if "pixels" not in key} | raw
    try:
        wanted = [theirs(**raw)(one, return_tensors="np")["image_grid_thw"][0].tolist() for one in pictures]
    except (TypeError, ValueError):
        with pytest.raises(InputError, match=r"shortest_edge and longest_edge|must be positive numbers"):
            config_of("qwen2_vl").open_pictures(write_folder(tmp_path, settings), "checkpoint")
        return
    ours = config_of("qwen2_vl").open_pictures(write_folder(tmp_path, settings), "checkpoint")
    assert [ours.read(one).arrays["image_grid_thw"].tolist() for one in pictures] == wanted


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_pixels": "64"}, "3136 and '64' pixels"),
        ({"min_pixels": True}, "True and"),
        ({"max_pixels": [64]}, "must be positive numbers"),
        ({"max_pixels": 500}, "in order"),
        ({"size": 56}, "size=56 must be an object"),
        ({"max_pixels": float("inf")}, "positive numbers"),
        ({"do_resize": "false"}, "do_resize='false'"),
        ({"do_normalize": 1}, "do_normalize=1 must be true or false"),
        ({"resample": "bicubic"}, "not valid"),
        ({"image_mean": ["a", 1, 1]}, "not valid"),
        ({"rescale_factor": {}}, "not valid"),
        ({"patch_size": "14"}, "patch_size='14'"),
        ({"image_processor_type": ["Qwen2VLImageProcessor"]}, "image_processor_type"),
        ({"patch_size": 16}, "different checkpoints"),
        ({"do_resize": False}, "do_resize"),
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ({"min_pixels": 10, "max_pixels": 5}, "positive"),
    ],
    ids=str,
)
def test_settings_that_are_refused(tmp_path, change, says):
    with pytest.raises(InputError, match=re.escape(says)):
        config_of("qwen2_vl").open_pictures(write_folder(tmp_path, SETTINGS | change), "checkpoint")


def test_the_first_name_of_the_image_processor(tmp_path):
    settings = SETTINGS | {"image_processor_type": "Qwen2_5_VLImageProcessor"}
    config_of("qwen2_5_vl").open_pictures(write_folder(tmp_path, settings), "checkpoint")
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": "Qwen2VLImageProcessor"}))
    with pytest.raises(InputError, match="must be an object"):
        config_of("qwen2_5_vl").open_pictures(tmp_path, "checkpoint")


def test_patches_are_those_of_transformers(processor):
    theirs = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").Qwen2VLImageProcessorPil(
        size={"shortest_edge": SETTINGS["min_pixels"], "longest_edge": SETTINGS["max_pixels"]}
    )
    rng = np.random.default_rng(0)
    pictures = [picture(*(int(side) for side in rng.integers(20, 500, 2)), seed=seed) for seed in range(10)]
    reads = [processor.pictures.read(one) for one in pictures]
    ours, wanted = processor.pictures.batch(reads), theirs(pictures, return_tensors="np")
    np.testing.assert_array_equal(ours["image_grid_thw"], wanted["image_grid_thw"])
    np.testing.assert_allclose(ours["pixel_values"], wanted["pixel_values"], atol=1e-5)
    assert [read.tokens for read in reads] == (wanted["image_grid_thw"].prod(axis=1) // 4).tolist()


def test_frames_of_a_video_are_patches_in_pairs(processor):
    """Frame by frame as an image of that size; an odd last one is repeated; then taken apart by hand."""
    frames = [picture(400, 200, seed) for seed in range(5)]
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
    video = Video(frames=[picture(56, 84, seed) for seed in range(4)])
    images = [picture(60, 90), picture(120, 57)]
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


def test_a_trace_serves_other_pictures_of_the_bucket(processor):
    one, other = (processor(picture(*size), "what?") for size in ((60, 90), (101, 60)))
    assert one.max_vision == other.max_vision == 64
    assert {key: value.shape for key, value in one.layout.items()} == {k: v.shape for k, v in other.layout.items()}
    assert one.pixels.shape == other.pixels.shape and one.tokens.shape == other.tokens.shape


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("video_preprocessor_config.json", {"size": {"shortest_edge": 4000, "longest_edge": 9000}}),
        ("processor_config.json", {"video_processor": {"min_pixels": 4000, "max_pixels": 9000}}),
    ],
)
def test_bounds_of_videos_may_be_in_another_file(tmp_path, file, content):
    write_folder(tmp_path, {key: value for key, value in SETTINGS.items() if "pixels" not in key})
    (tmp_path / file).write_text(json.dumps(content))
    made = config_of("qwen2_vl").open_pictures(tmp_path, "checkpoint")
    assert (made.settings["video"].least, made.settings["video"].most) == (4000, 9000)
    assert (made.settings["image"].least, made.settings["image"].most) == (3136, 1003520)


def test_pictures_that_are_refused(processor, tmp_path):
    with pytest.raises(vlkv.InputError, match="too long and thin"):
        processor(picture(3000, 10), "what?")
    with pytest.raises(vlkv.InputError, match="differ in size"):
        processor(Video(frames=[picture(56, 56), picture(56, 57)]), "what?")
    with pytest.raises(vlkv.InputError, match="layout='pad'"):
        Processor.from_folder(write_folder(tmp_path), processor.config, layout="pad")
