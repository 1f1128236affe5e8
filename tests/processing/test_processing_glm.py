"""GLM's prompts with videos beside transformers' processors; `test_every_processor.py` has its images.

torchvision is not needed: transformers' video processor is replaced by its steps in numpy, with its own smart_resize.
"""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.processing.conftest import make_tokenizer, noise, spelled, write_files
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.processing import Processor, Video

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
    """A tokenizer with one token per byte and the marks, the template and the settings."""
    tokenizer = make_tokenizer("<|image|>", bos=False)
    tokenizer.add_special_tokens(SPECIAL)
    assert tokenizer.token_to_id("<|video|>") == VIDEO
    return write_files(folder, tokenizer, tokenizer_config={"eos_token": "</s>"}, chat_template=TEMPLATE,
                       preprocessor_config=settings, video_preprocessor_config=video)  # fmt: skip


def make_theirs(name, monkeypatch):
    """transformers' processor of this name."""
    transformers = pytest.importorskip("transformers")
    folder = {"Glm4vProcessor": "glm4v", "Glm46VProcessor": "glm46v"}[name]
    images = pytest.importorskip(f"transformers.models.{folder}.image_processing_pil_{folder}")
    text = pytest.importorskip(f"transformers.models.{folder}.processing_{folder}")
    reader = getattr(images, name.replace("Processor", "ImageProcessorPil"))
    options = {key: SETTINGS[key] for key in ("size", "patch_size", "merge_size", "temporal_patch_size")}

    class Videos:
        merge_size = 2
        model_input_names = ("pixel_values_videos", "video_grid_thw")
        rates = ()  # frames per second of each video

        def fetch_videos(self, videos, **options):
            return videos

        def __call__(self, videos, **options):
            read = [_video_patches(frames, images.smart_resize) for frames in videos]
            metadata = [
                transformers.video_utils.VideoMetadata(
                    total_num_frames=len(frames), fps=fps, frames_indices=range(len(frames)))
                for frames, fps in zip(videos, self.rates, strict=True)
            ]  # fmt: skip
            return transformers.BatchFeature({
                "pixel_values_videos": np.concatenate([patches for patches, _ in read]),
                "video_grid_thw": np.array([grid for _, grid in read]), "video_metadata": metadata})  # fmt: skip

    tokenizer = make_tokenizer("<|image|>", bos=False)
    tokenizer.add_special_tokens(SPECIAL)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<unk>", eos_token="</s>")
    kind = getattr(text, name)
    monkeypatch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
    return kind(reader(**options), fast, Videos())


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


@pytest.mark.parametrize("name", ["Glm46VProcessor", "Glm4vProcessor"])
def test_images_and_videos_in_one_prompt_are_those_of_transformers(tmp_path, name, monkeypatch):
    """Images between two videos of 5 and 2 frames, one of them smaller than a token; times are written in two ways."""
    folder = write_folder(tmp_path, SETTINGS | {"processor_class": name})
    ours, theirs = Processor.from_folder(folder, config_from_hf(RAW)), make_theirs(name, monkeypatch)
    videos = [Video([noise(60, 33, seed) for seed in range(5)], fps=1.6), Video([noise(30, 5, 7)] * 2, fps=24.0)]
    images = [noise(40, 90), noise(25, 31)]
    inputs = ours([[videos[0], images[0], images[1], videos[1]]], ["a <video> b <image><image> c <video>?"])
    template = ours.prompts.write("a <video> b <image><image> c <video>?", 2, 2)
    theirs.video_processor.rates = [video.fps for video in videos]
    frames = [np.stack([np.asarray(frame) for frame in video.frames]) for video in videos]
    wanted = theirs(text=[template], images=images, videos=frames, return_tensors="np")
    np.testing.assert_array_equal(inputs.tokens[0][inputs.valid[0]], wanted["input_ids"][0])
    np.testing.assert_array_equal(inputs.is_vision[0][inputs.valid[0]], wanted["mm_token_type_ids"][0] > 0)
    made = vlkv.Inputs.from_hf(dict(wanted), ours.config)
    for field in ("tokens", "valid", "vision_index", "grid", "frame", "positions"):
        np.testing.assert_array_equal(getattr(made, field), getattr(inputs, field))
    np.testing.assert_allclose(made.pixels, inputs.pixels, atol=1e-5)
    at = [np.flatnonzero(inputs.grid[0, :, 0] == view)[0] for view in range(6)]
    assert inputs.frame[0, at].tolist() == [0, 1, 2, -1, -1, 0], "frames of the tower, made of two pictures"
    times = ["0", "1", "2"] if name == "Glm4vProcessor" else ["0.0 seconds", "1.2 seconds", "2.5 seconds"]
    assert all(f"<|end_of_image|>{time}<|" in spelled(ours, inputs) for time in times)


def test_the_processor_of_a_folder_without_a_name(tmp_path):
    """The `model_type` decides, as in transformers."""
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
    from vlkv.families.qwen2_vl.scaling import ScaleSettings

    settings = ScaleSettings(least=12544, most=9633792, pixels=None)
    for size, grid in (((6000, 4000), (128, 192)), ((1700, 2200), (158, 122)), ((100, 100), (8, 8))):
        height, width = settings.scaled_together(size[1], size[0], 28, 2, 2)
        assert (height // 14, width // 14) == grid


def test_an_image_token_in_a_question_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"image token"):
        Processor.from_folder(write_folder(tmp_path), config_from_hf(RAW))(noise(30, 30), "what is <|image|>?")
