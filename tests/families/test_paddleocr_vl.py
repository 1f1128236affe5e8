"""What is special about PaddleOCR-VL: its processor. `test_every_family.py` has the rest."""

import dataclasses

import numpy as np
import pytest

import vlkv
from tests.processing.conftest import make_tokenizer, noise, write_files
from vlkv.processing import Processor

SETTINGS = {
    "image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 14, "temporal_patch_size": 1, "merge_size": 2,
    "size": {"shortest_edge": 8 * 28 * 28, "longest_edge": 40 * 28 * 28}, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}  # fmt: skip


def write_processor(folder, settings=SETTINGS) -> None:
    tokenizer = make_tokenizer("<|IMAGE_PLACEHOLDER|>", bos=False)
    tokenizer.add_special_tokens(["<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_END|>"])
    write_files(folder, tokenizer, tokenizer_config={"eos_token": "</s>"}, preprocessor_config=settings)


@pytest.fixture
def processor(tmp_path) -> Processor:
    write_processor(tmp_path)
    return Processor.from_folder(tmp_path, dataclasses.replace(vlkv.presets["paddleocr-vl-0.9b"], image_token=3))


def test_images_of_the_first_question_belong_to_the_chat(processor):
    chat = vlkv.Chat(vlkv.families.abstract(processor.config), processor)
    with pytest.raises(vlkv.InputError, match=r"first question to Chat\(params, processor, image\)"):
        chat.ask("OCR:", image=np.zeros((40, 40, 3), np.uint8))


def test_the_authors_settings(tmp_path):
    pixels = {"min_pixels": 147384, "max_pixels": 2822400}
    write_processor(tmp_path, SETTINGS | pixels | {"image_processor_type": "SiglipImageProcessor", "size": pixels})
    settings = vlkv.presets["paddleocr-vl-0.9b"].read_settings(tmp_path, "checkpoint")["image"]
    assert (settings.least, settings.most, settings.pixels.size) == (147384, 2822400, None)


def test_videos_are_refused(tmp_path):
    write_processor(tmp_path, SETTINGS)
    pictures = vlkv.presets["paddleocr-vl-0.9b"].open_pictures(tmp_path, "checkpoint")
    with pytest.raises(vlkv.InputError, match="does not support videos"):
        pictures.read(vlkv.processing.Video([noise(30, 30)]))
