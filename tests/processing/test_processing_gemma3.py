"""Gemma 3's images, crops and marks against transformers' processor on PIL."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
from tokenizers import processors

import vlkv
from tests.processing.conftest import byte_tokenizer, noise, spelled
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.processing import Processor
from vlkv.processing.arranging import cells

SPECIAL = ["<pad>", "<eos>", "<bos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_turn>",
           "<end_of_turn>"]  # fmt: skip
IMAGE = SPECIAL.index("<image_soft_token>")
SIDE, TOKENS = 28, 4
CROPS = {"pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
# As in the published folders, where the settings of pan and scan are null.
SETTINGS = {
    "image_processor_type": "Gemma3ImageProcessor", "do_convert_rgb": None, "do_normalize": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": TOKENS, "resample": 2,
    "rescale_factor": 1 / 255, "size": {"height": SIDE, "width": SIDE}, "do_pan_and_scan": None,
    **dict.fromkeys(CROPS),
}  # fmt: skip
RAW = dict(
    model_type="gemma3", image_token_index=IMAGE, mm_tokens_per_image=TOKENS,
    text_config=dict(vocab_size=300, hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
                     num_key_value_heads=2, head_dim=8, sliding_window=8, max_position_embeddings=4096),
    vision_config=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                       image_size=SIDE, patch_size=7),
)  # fmt: skip


def write_folder(folder, **changes):
    """A tokenizer with one token per byte, which adds <bos>, and the image settings."""
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | changes))
    return folder


@pytest.fixture(scope="module")
def theirs():
    """transformers' processors, without the tokenizer and torchvision."""
    pil = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    text = pytest.importorskip("transformers.models.gemma3.processing_gemma3").Gemma3Processor
    like = types.SimpleNamespace(full_image_sequence="\n\n<start_of_image>" + "<image_soft_token>" * TOKENS
                                 + "<end_of_image>\n\n")  # fmt: skip
    settings = {name: value for name, value in SETTINGS.items() if value is not None and name != "image_processor_type"}
    return types.SimpleNamespace(
        read=lambda image, **options: pil.Gemma3ImageProcessorPil(**settings)([image], return_tensors="np", **options),
        text=lambda made: text.replace_image_token(like, made, 0),
        defaults=text.images_kwargs,
    )


@pytest.mark.parametrize("crops", [False, True])
def test_pixels_and_text_of_200_sizes_are_those_of_transformers(tmp_path, theirs, crops):
    layout = "pan_and_scan" if crops else "checkpoint"
    ours = Processor.from_folder(write_folder(tmp_path, **CROPS), config_from_hf(RAW), layout=layout).pictures
    rng, found = np.random.default_rng(0), set()
    sizes = np.exp(rng.uniform(np.log(4), np.log(300), (200, 2))).astype(int).tolist()
    for seed, (width, height) in enumerate([*sizes, (28, 28), (60, 50), (50, 60), (61, 50), (300, 16), (16, 300)]):
        image = noise(width, height, seed)
        read, wanted = ours.read(image), theirs.read(image, do_pan_and_scan=crops, **CROPS)
        np.testing.assert_array_equal(read.arrays["pixel_values"], wanted["pixel_values"])
        assert read.text == theirs.text(wanted)
        assert read.tokens == read.text.count("<image_soft_token>") == TOKENS * len(read.arrays["pixel_values"])
        found.add(len(read.arrays["pixel_values"]))
    assert found == ({1, 3, 4, 5} if crops else {1})


def test_the_defaults_are_those_of_transformers(tmp_path, theirs):
    """Null in the file; long images get crops only with the option."""
    folder, config, image = write_folder(tmp_path), config_from_hf(RAW), noise(800, 300)
    plain, crops = (Processor.from_folder(folder, config, layout=x).pictures for x in ("checkpoint", "pan_and_scan"))
    wanted = {name: value for name, value in theirs.defaults.items() if name.startswith("pan_and_scan")}
    assert not theirs.defaults["do_pan_and_scan"] and plain.read(image).text == theirs.text(theirs.read(image))
    made = theirs.read(image, do_pan_and_scan=True, **wanted)
    np.testing.assert_array_equal(crops.read(image).arrays["pixel_values"], made["pixel_values"])
    assert crops.read(image).text == theirs.text(made) and len(made["pixel_values"]) == 4
    always = write_folder(tmp_path, do_pan_and_scan=True)
    assert Processor.from_folder(always, config).pictures.read(image).tokens == 4 * TOKENS


def test_a_conversation(tmp_path):
    """One <bos>, line breaks around the marks; a crop shows a part of the image before it."""
    processor = Processor.from_folder(write_folder(tmp_path, **CROPS), config_from_hf(RAW), layout="pan_and_scan")
    inputs = processor([[noise(60, 29), noise(28, 30)], []], ["look <image> and <image> what?", "hi"])
    wide, tall = (processor.pictures.read(noise(*size)).text for size in ((60, 29), (28, 30)))
    assert spelled(processor, inputs) == (
        f"<bos><start_of_turn>user\nlook{wide}and{tall}what?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert spelled(processor, inputs, 1) == "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    assert inputs.is_vision.sum(axis=1).tolist() == [(1 + 2 + 1) * TOKENS, 0]
    image, _, _ = inputs.grid[0][inputs.is_vision[0]].reshape(4, TOKENS, 3).transpose(2, 0, 1)
    tile, shown = inputs.tiles[0][inputs.is_vision[0]].reshape(4, TOKENS, 2).transpose(2, 0, 1)
    assert (image[:, 0] == np.arange(4)).all() and (tile[:, 0] == np.arange(4)).all()
    np.testing.assert_array_equal(shown[0], 1 + cells(2, 1, 2).ravel())
    assert (shown[1:] == -1).all()
    with pytest.raises(InputError, match="contains the model's image token '<start_of_image>'"):
        processor(noise(28, 28), "what is <start_of_image>?")


def test_images_without_text_between_them_are_refused():
    """Their tokens would be one block, in which they attend to each other."""
    ids = np.array([[2, 9, *[IMAGE] * TOKENS, *[IMAGE] * TOKENS, 9]])
    batch = {"input_ids": ids, "pixel_values": np.zeros((2, 3, SIDE, SIDE), np.float32)}
    with pytest.raises(InputError, match="two images of a prompt have no text between them"):
        vlkv.Inputs.from_hf(batch, config_from_hf(RAW))
    batch["input_ids"] = np.insert(ids, 2 + TOKENS, 9, axis=1)
    assert vlkv.Inputs.from_hf(batch, config_from_hf(RAW)).is_vision.sum() == 2 * TOKENS


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"size": {"height": 56, "width": 56}}, "the files belong to different checkpoints"),
        ({"do_pan_and_scan": "yes"}, "must be true or false"),
        ({"pan_and_scan_max_num_crops": 0}, "pan_and_scan_max_num_crops=0 must be a number of at least 1"),
        ({"pan_and_scan_min_crop_size": 2.5}, "pan_and_scan_min_crop_size=2.5"),
        ({"image_processor_type": "CLIPImageProcessor"}, "not supported"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        Processor.from_folder(write_folder(tmp_path, **changes), config_from_hf(RAW))(noise(28, 28), "what?")


def test_a_layout_of_other_families(tmp_path):
    with pytest.raises(InputError, match="layout='pad' is not supported for gemma3"):
        Processor.from_folder(write_folder(tmp_path), config_from_hf(RAW), layout="pad")
