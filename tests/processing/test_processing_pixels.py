"""Pixels: values to compute by hand, and parity with transformers' image processors on PIL."""

import json

import numpy as np
import PIL.Image
import pytest

from tests.processing.conftest import noise
from vlkv.errors import InputError
from vlkv.families.llava.config import LLAVA_KINDS
from vlkv.processing.pixels import PixelSettings, read_settings, to_pixels

VARIANTS = {
    "defaults": None,
    "crop larger than the picture": {"do_resize": False, "crop_size": {"height": 301, "width": 128}},
    "odd crop": {"crop_size": {"height": 27, "width": 26}},
    "crop larger than the resized": {"size": {"shortest_edge": 20}},
    "one mean": {"image_mean": 0.5, "image_std": [0.5, 0.25, 1.0]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_with_clip(variant, settings_of):
    """`test_every_processor.py` has other settings and sizes."""
    clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    raw = {} if VARIANTS[variant] is None else settings_of(**VARIANTS[variant])
    settings = PixelSettings.from_hf(raw, "test")
    if isinstance(raw.get("image_mean"), float):  # transformers' own argument check refuses a number
        raw["image_mean"] = [raw["image_mean"]] * 3
    for seed, size in enumerate([(301, 250), (1, 1), (1, 100), (28, 57)]):
        image = noise(*size, seed)
        wanted = clip.CLIPImageProcessorPil(**raw)(image, return_tensors="np")["pixel_values"][0]
        got = to_pixels(image, settings)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=0)


def test_padding_is_asked_for_in_the_file_or_by_the_layout(settings_of):
    """Its parity is tested with the whole processor."""
    raw = settings_of(image_processor_type="LlavaImageProcessorFast", do_pad=True)
    by_file = PixelSettings.from_hf(raw, "test", kinds=LLAVA_KINDS)
    assert by_file == PixelSettings.from_hf(settings_of(), "test", "pad") and by_file.square


def test_values_by_hand(settings_of):
    raw = settings_of(image_mean=[0.0, 0.5, 1.0], image_std=[1.0, 0.5, 2.0])
    pixels = to_pixels(PIL.Image.new("RGB", (90, 60), (255, 255, 51)), PixelSettings.from_hf(raw, "test"))
    assert pixels.shape == (3, 28, 28)
    np.testing.assert_allclose(pixels[:, 0, 0], [1.0, 1.0, -0.4], atol=1e-6)


def test_padding_is_the_mean_colour_and_keeps_the_sides(settings_of):
    image = PIL.Image.new("RGB", (28, 14), (255, 0, 0))
    pixels = to_pixels(image, PixelSettings.from_hf(settings_of(), "test", "pad"))
    assert abs(pixels[:, 0, 0]).max() < 0.02  # the mean, rounded down to 8 bits, is about zero once normalised
    assert pixels[0, 14].min() > 1.9  # the red band runs from side to side


def test_both_generations_of_files(tmp_path, settings_of):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings_of(resample=2)))
    assert read_settings(tmp_path).resample == PIL.Image.Resampling.BILINEAR
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor"}))
    assert read_settings(tmp_path).resample == PIL.Image.Resampling.BILINEAR
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings_of(resample=0)}))
    assert read_settings(tmp_path).resample == PIL.Image.Resampling.NEAREST
    assert not read_settings(tmp_path).square
    assert read_settings(tmp_path, "pad").square


@pytest.mark.parametrize(
    "change",
    [
        {"image_processor_type": "ViTImageProcessor"},
        {"size": {"longest_edge": 28}},
        {"size": {"shortest_edge": 0}},
        {"crop_size": "wide"},
        {"resample": 99},
        {"image_mean": [0.5, 0.5]},
        {"image_std": "none"},
        {"pad_size": {"height": 4, "width": 4}},
    ],
)
def test_settings_that_are_refused(change, settings_of):
    with pytest.raises(InputError, match=r"folder/file\.json"):
        PixelSettings.from_hf(settings_of(**change), "folder/file.json")


def test_files_that_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"preprocessor_config\.json: no such file"):
        read_settings(tmp_path)
    path = tmp_path / "processor_config.json"
    for content, reason in ((b'{"image_processor"', "JSON"), (b"[]", "list"), (b"\xff\xfe", "text")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"processor_config\.json.*{reason}"):
            read_settings(tmp_path)


def test_a_line_of_pixels_does_not_fill_the_memory(settings_of):
    line = PIL.Image.new("RGB", (1, 1_000_000))
    for layout in ("checkpoint", "pad"):
        with pytest.raises(InputError, match=r"after (resizing|padding)"):
            to_pixels(line, PixelSettings.from_hf(settings_of(size={"shortest_edge": 336}), "test", layout))
