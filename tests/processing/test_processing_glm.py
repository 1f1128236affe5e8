"""GLM's prompts with videos beside transformers' text, and its video processor's steps in numpy."""

import types
from functools import partial

import numpy as np
import PIL.Image
import pytest

from tests.processing.conftest import make_tokenizer, noise, spelled, write_files
from vlkv.families import config_from_hf
from vlkv.processing import Processor, Video
from vlkv.processing.pixels import ScaleSettings

SPECIAL = ["<|video|>", "<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_image|>", "<|end_of_image|>"]
IMAGE, VIDEO = 3, 260
# The form of the published templates.
TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}<|{{ message.role }}|>
{% for item in message.content %}
{%- if item.type == 'image' %}<|begin_of_image|><|image|><|end_of_image|>
{%- elif item.type == 'video' %}<|begin_of_video|><|video|><|end_of_video|>
{%- else %}{{ item.text }}{% endif %}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
LIMITS = {"shortest_edge": 1500, "longest_edge": 30_000}
SETTINGS = {
    "image_processor_type": "Glm46VImageProcessor", "processor_class": "Glm46VProcessor", "size": LIMITS,
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "do_rescale": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
VIDEO_SETTINGS = {"video_processor_type": "Glm46VVideoProcessor", "patch_size": 4, "temporal_patch_size": 2,
                  "merge_size": 2, "size": {"shortest_edge": 2000, "longest_edge": 20_000}, "fps": 2}  # fmt: skip
RAW = dict(
    model_type="glm4v", image_token_id=IMAGE, video_start_token_id=VIDEO + 1, video_end_token_id=VIDEO + 2,
    text_config=dict(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, max_position_embeddings=65536,
                     rope_parameters=dict(mrope_section=[2, 1, 1])),
    vision_config=dict(depth=1, hidden_size=16, num_heads=2, patch_size=4, out_hidden_size=16, intermediate_size=20),
)  # fmt: skip


def write_folder(folder, settings=SETTINGS, video=VIDEO_SETTINGS):
    tokenizer = make_tokenizer("<|image|>", bos=False)
    tokenizer.add_special_tokens(SPECIAL)
    assert tokenizer.token_to_id("<|video|>") == VIDEO
    return write_files(folder, tokenizer, tokenizer_config={"eos_token": "</s>"}, chat_template=TEMPLATE,
                       preprocessor_config=settings, video_preprocessor_config=video)  # fmt: skip


def _video_patches(frames, smart_resize):
    """The steps of transformers' video processor, with PIL's resizing."""
    count, limits = len(frames), VIDEO_SETTINGS["size"]
    height, width = smart_resize(count, *frames.shape[1:3], 2, 8, *limits.values())
    resized = [PIL.Image.fromarray(frame).resize((width, height), PIL.Image.Resampling.BICUBIC) for frame in frames]
    pixels = np.stack([np.asarray(frame) for frame in resized])
    pixels = (pixels / 255 - SETTINGS["image_mean"]) / SETTINGS["image_std"]
    pixels = np.concatenate([pixels, pixels[-1:]])[: count + count % 2].transpose(0, 3, 1, 2)
    grid = (len(pixels) // 2, height // 4, width // 4)
    parts = pixels.reshape(grid[0], 2, 3, grid[1] // 2, 2, 4, grid[2] // 2, 2, 4)
    patches = parts.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * 4 * 4)
    return patches.astype(np.float32), grid


@pytest.mark.parametrize("name", ["Glm46V", "Glm4v"])
def test_images_and_videos_in_one_prompt_are_those_of_transformers(tmp_path, name):
    """Images between two videos of 5 and 2 frames, one of them smaller than a token; times are written in two ways."""
    module, token = name.lower(), "<|image|>"
    theirs = getattr(pytest.importorskip(f"transformers.models.{module}.processing_{module}"), f"{name}Processor")
    resize = pytest.importorskip(f"transformers.models.{module}.image_processing_pil_{module}").smart_resize
    like = types.SimpleNamespace(image_token=token, video_processor=types.SimpleNamespace(merge_size=2))
    like.replace_frame_token_id = partial(theirs.replace_frame_token_id, like)
    ours = Processor.from_folder(
        write_folder(tmp_path, SETTINGS | {"processor_class": f"{name}Processor"}), config_from_hf(RAW)
    )
    videos = [Video([noise(60, 33, seed) for seed in range(5)], fps=1.6), Video([noise(30, 5, 7)] * 2, fps=24.0)]
    images, said = [noise(40, 90), noise(25, 31)], []
    for video in videos:
        patches, grid = _video_patches(np.stack([np.asarray(frame) for frame in video.frames]), resize)
        read = ours.pictures.read(video)
        assert tuple(read.arrays["video_grid_thw"]) == grid
        np.testing.assert_allclose(read.arrays["pixel_values_videos"], patches, atol=1e-5)
        times = types.SimpleNamespace(fps=video.fps, timestamps=[i / video.fps for i in range(len(video.frames))])
        given = {"video_grid_thw": [np.array(grid)], "video_metadata": [times]}
        said.append(f"<|begin_of_video|>{theirs.replace_video_token(like, given, 0)}<|end_of_video|>")
    counts = [ours.pictures.read(image).tokens for image in images]
    shown = "".join(f"<|begin_of_image|>{token * count}<|end_of_image|>" for count in counts)
    inputs = ours([[videos[0], *images, videos[1]]], ["a <video> b <image><image> c <video>?"])
    wanted = f"[gMASK]<sop><|user|>\na {said[0]} b {shown} c {said[1]}?<|assistant|>\n"
    assert spelled(ours, inputs) == wanted and inputs.is_vision.sum() == wanted.count(token)
    at = [np.flatnonzero(inputs.grid[0, :, 0] == view)[0] for view in range(6)]
    assert inputs.frame[0, at].tolist() == [0, 1, 2, -1, -1, 0], "frames of the tower, made of two pictures"


def test_the_processor_of_a_folder_without_a_name(tmp_path):
    settings = {key: value for key, value in SETTINGS.items() if key != "processor_class"}
    folder = write_folder(tmp_path, settings)
    for kind, whole in (("glm4v", True), ("glm46v", False), ("glm_ocr", False)):
        assert config_from_hf(RAW | {"model_type": kind}).open_pictures(folder, "checkpoint").whole_seconds is whole


def test_limits_of_a_folder_without_them_are_those_of_transformers(tmp_path):
    settings = {key: value for key, value in SETTINGS.items() if key != "size"}
    folder = write_folder(tmp_path, settings, {key: value for key, value in VIDEO_SETTINGS.items() if key != "size"})
    ours = config_from_hf(RAW).open_pictures(folder, "checkpoint").settings
    reader = pytest.importorskip("transformers.models.glm46v.image_processing_pil_glm46v").Glm46VImageProcessorPil
    assert (ours["image"].least, ours["image"].most) == tuple(reader.size.values())
    assert (ours["video"].least, ours["video"].most) == (112 * 112, 28 * 28 * 2 * 30000)


def test_grids_of_the_published_settings():
    """Measured with transformers' own processor by a public port of GLM-OCR."""
    settings = ScaleSettings(least=12544, most=9633792, pixels=None)
    for (width, height), grid in {(6000, 4000): (128, 192), (1700, 2200): (158, 122), (100, 100): (8, 8)}.items():
        assert tuple(side // 14 for side in settings.scaled_together(height, width, 28, 2, 2)) == grid
