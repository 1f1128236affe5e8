"""Limits, videos and prompts of Qwen2-VL and Qwen2.5-VL; `tests/processing/test_every_processor.py` has images."""

import json

import pytest

from tests.processing.conftest import make_tokenizer, noise, tiny_config, write_files
from vlkv.errors import InputError
from vlkv.processing import Processor

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
