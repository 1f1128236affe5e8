"""What is special about PaddleOCR-VL: its processor. `test_every_family.py` has the rest."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.parity.conftest import transformers
from tests.processing.conftest import make_tokenizer
from vlkv.processing import Processor, Video

SETTINGS = {
    "image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 14, "temporal_patch_size": 1, "merge_size": 2,
    "size": {"shortest_edge": 8 * 28 * 28, "longest_edge": 40 * 28 * 28}, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}  # fmt: skip


def write_processor(folder, settings=SETTINGS) -> None:
    """A tokenizer with tokens like those of the published checkpoint, and settings of images; no chat template."""
    tokenizer = make_tokenizer("<|IMAGE_PLACEHOLDER|>", bos=False)
    tokenizer.add_special_tokens(["<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_END|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


@pytest.fixture
def processor(tmp_path) -> Processor:
    write_processor(tmp_path)
    return Processor.from_folder(tmp_path, dataclasses.replace(vlkv.presets["paddleocr-vl-0.9b"], image_token=3))


def random_image(rng) -> PIL.Image.Image:
    """Also with a side that is shorter than a token."""
    height, width = (int(side) for side in np.exp(rng.uniform(2, 6.3, 2)))
    return PIL.Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8))


def test_patches_are_those_of_the_checkpoints_processor(processor):
    """60 images of random sizes, and their numbers of tokens."""
    module = pytest.importorskip("transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl")
    theirs = module.PaddleOCRVLImageProcessorPil(
        **{name: value for name, value in SETTINGS.items() if name != "image_processor_type"}
    )
    rng = np.random.default_rng(0)
    images = [random_image(rng) for _ in range(60)]
    assert min(min(image.size) for image in images) < 28 and max(max(image.size) for image in images) > 400
    for image in images:
        read = processor.pictures.read(image)
        wanted = theirs([image], return_tensors="np")
        np.testing.assert_array_equal(read.arrays["image_grid_thw"], wanted["image_grid_thw"][0])
        np.testing.assert_allclose(read.arrays["pixel_values"], wanted["pixel_values"], atol=1e-5)
        assert read.tokens == wanted["image_grid_thw"].prod() // 4


MARK = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"


def make_theirs(folder):
    """transformers' processor of a folder."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"}
    )
    return transformers.PaddleOCRVLProcessor(
        transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"), tokenizer
    )


def test_images_of_the_first_question_belong_to_the_chat(processor):
    chat = vlkv.Chat(vlkv.families.abstract(processor.config), processor)
    with pytest.raises(vlkv.InputError, match=r"first question to Chat\(params, processor, image\)"):
        chat.ask("OCR:", image=np.zeros((40, 40, 3), np.uint8))


def test_ids_are_those_of_the_checkpoints_processor(processor, tmp_path):
    """Several images in a prompt, in the family's own format."""
    theirs, rng = make_theirs(tmp_path), np.random.default_rng(2)
    images = [random_image(rng) for _ in range(2)]
    inputs = processor([images], ["OCR:"])
    text = f"<|begin_of_sentence|>User: {MARK}{MARK}OCR:\nAssistant: "
    wanted = theirs(images=images, text=text)["input_ids"][0]
    np.testing.assert_array_equal(inputs.tokens[0][inputs.valid[0]], wanted)
    assert inputs.is_vision.sum() == (np.asarray(wanted) == 3).sum()


def test_the_authors_settings(tmp_path):
    """Their names of the processor and of the limits."""
    pixels = {"min_pixels": 147384, "max_pixels": 2822400}
    write_processor(tmp_path, SETTINGS | pixels | {"image_processor_type": "SiglipImageProcessor", "size": pixels})
    settings = vlkv.presets["paddleocr-vl-0.9b"].read_settings(tmp_path, "checkpoint", ("image",))["image"]
    assert (settings.least, settings.most, settings.pixels.size) == (147384, 2822400, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "PaddleOCRVLImageProcessor, SiglipImageProcessor"),
        ({"temporal_patch_size": 2}, "temporal_patch_size=2, but the tower"),
        ({"do_resize": False}, "do_resize=False"),
        ({"size": {"height": 384, "width": 384}}, "shortest_edge and longest_edge"),
    ],
    ids=str,
)
def test_settings_that_are_not_honoured(tmp_path, change, message):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS | change))
    with pytest.raises(vlkv.InputError, match=message):
        vlkv.presets["paddleocr-vl-0.9b"].open_pictures(tmp_path, "checkpoint")


def test_an_image_that_is_too_long_and_a_video_are_refused(processor):
    with pytest.raises(vlkv.InputError, match="too long and thin"):
        processor(np.zeros((40, 28 * 300, 3), np.uint8), "OCR:")
    with pytest.raises(vlkv.InputError, match="does not support videos"):
        processor(Video(np.zeros((2, 40, 40, 3), np.uint8)), "OCR:")
