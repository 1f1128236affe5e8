"""Prompts and marks of Gemma 3 and Gemma 4; `test_every_processor.py` has their images."""

import types

import numpy as np
import pytest
from tokenizers import processors

import vlkv
from tests.families import tiny
from tests.processing.conftest import byte_tokenizer, noise, spelled, tiny_config, write_files
from vlkv.errors import InputError
from vlkv.processing import Processor
from vlkv.processing.arranging import cells

SPECIAL = ["<pad>", "<eos>", "<bos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_turn>",
           "<end_of_turn>"]  # fmt: skip
IMAGE, SIDE, TOKENS = SPECIAL.index("<image_soft_token>"), 42, 9
CROPS = {"pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
# As in the published folders, where the settings of pan and scan are null.
SETTINGS = {
    "image_processor_type": "Gemma3ImageProcessor", "do_convert_rgb": None, "do_normalize": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": TOKENS, "resample": 2,
    "rescale_factor": 1 / 255, "size": {"height": SIDE, "width": SIDE}, "do_pan_and_scan": None,
    **dict.fromkeys(CROPS),
}  # fmt: skip
CONFIG = tiny_config("gemma3", image_token_index=IMAGE)


def gemma3(folder, layout="checkpoint", **changes) -> Processor:
    """Its tokenizer adds <bos>."""
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
    )
    write_files(folder, tokenizer, tokenizer_config={"bos_token": "<bos>", "eos_token": "<eos>"},
                preprocessor_config=SETTINGS | changes)  # fmt: skip
    return Processor.from_folder(folder, CONFIG, layout=layout)


def test_the_defaults_are_those_of_transformers(tmp_path):
    """Null in the file; long images get crops only with the option."""
    pil = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3").Gemma3ImageProcessorPil
    theirs = pytest.importorskip("transformers.models.gemma3.processing_gemma3").Gemma3Processor
    whole = "\n\n<start_of_image>" + "<image_soft_token>" * TOKENS + "<end_of_image>\n\n"
    like, image = types.SimpleNamespace(full_image_sequence=whole), noise(800, 300)
    settings = {name: value for name, value in SETTINGS.items() if value is not None and name != "image_processor_type"}
    defaults = {name: value for name, value in theirs.images_kwargs.items() if name.startswith("pan_and_scan")}
    made = pil(**settings)([image], return_tensors="np", do_pan_and_scan=True, **defaults)
    assert not theirs.images_kwargs["do_pan_and_scan"] and len(made["pixel_values"]) == 4
    assert gemma3(tmp_path).pictures.read(image).text == whole
    read = gemma3(tmp_path, "pan_and_scan").pictures.read(image)
    np.testing.assert_array_equal(read.arrays["pixel_values"], made["pixel_values"])
    assert read.text == theirs.replace_image_token(like, made, 0)
    assert gemma3(tmp_path, do_pan_and_scan=True).pictures.read(image).tokens == 4 * TOKENS


def test_a_conversation_of_gemma_3(tmp_path):
    """One <bos>, line breaks around the marks; a crop shows a part of the image before it."""
    processor = gemma3(tmp_path, "pan_and_scan", **CROPS)
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
    np.testing.assert_array_equal(shown[0], 1 + cells(3, 1, 2).ravel())
    assert (shown[1:] == -1).all()
    with pytest.raises(InputError, match="contains the model's image token '<start_of_image>'"):
        processor(noise(28, 28), "what is <start_of_image>?")


def test_images_without_text_between_them_are_refused():
    """Their tokens would be one block, in which they attend to each other."""
    ids = np.array([[2, 9, *[IMAGE] * TOKENS, *[IMAGE] * TOKENS, 9]])
    batch = {"input_ids": ids, "pixel_values": np.zeros((2, 3, SIDE, SIDE), np.float32)}
    with pytest.raises(InputError, match="two images of a prompt have no text between them"):
        vlkv.Inputs.from_hf(batch, CONFIG)
    batch["input_ids"] = np.insert(ids, 2 + TOKENS, 9, axis=1)
    assert vlkv.Inputs.from_hf(batch, CONFIG).is_vision.sum() == 2 * TOKENS


# --- Gemma 4 ----------------------------------------------------------------------------------------------------------

MARKS = ["<pad>", "<eos>", "<bos>", "<|image>", "<image|>", "<|image|>", "<|turn>", "<turn|>", "<|audio|>"]
IMAGE4, MERGE, MOST = MARKS.index("<|image|>"), 2, 70
CONFIG4 = tiny_config(
    "gemma4", text=dict(vocab_size_per_layer_input=300), image_token_id=IMAGE4, video_token_id=299,
    audio_token_id=MARKS.index("<|audio|>"), vision_soft_tokens_per_image=MOST,
    vision_config=tiny.RAW["gemma4"]["vision_config"] | dict(position_embedding_size=300),
)  # fmt: skip


@pytest.fixture
def gemma4(tmp_path):
    tokenizer = byte_tokenizer(MARKS)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "boi_token": "<|image>", "image_token": "<|image|>",
             "eoi_token": "<image|>"}  # fmt: skip
    settings = dict(image_processor_type="Gemma4ImageProcessor", patch_size=4, pooling_kernel_size=MERGE,
                    max_soft_tokens=MOST)  # fmt: skip
    write_files(tmp_path, tokenizer, tokenizer_config=named, preprocessor_config=settings)
    return Processor.from_folder(tmp_path, CONFIG4)


def test_a_conversation_of_gemma_4(gemma4):
    """One <bos>, from the template; each image between its marks, its tokens in lines and columns."""
    inputs = gemma4([[noise(120, 84), noise(60, 200)], []], ["look <image> and <image> what?", "hi"])
    wide, tall = (gemma4.pictures.read(noise(*size)).text for size in ((120, 84), (60, 200)))
    assert spelled(gemma4, inputs) == f"<bos><|turn>user\nlook{wide}and{tall}what?<turn|>\n<|turn>model\n"
    assert spelled(gemma4, inputs, 1) == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    image, line, column = inputs.grid[0][inputs.is_vision[0]].T
    assert [(line[image == i].max() + 1, column[image == i].max() + 1) for i in (0, 1)] == [(7, 10), (15, 4)]
    np.testing.assert_array_equal(line[image == 0] * 10 + column[image == 0], np.arange(70))
    with pytest.raises(InputError, match="audio is not supported"):
        gemma4(None, "what is <|audio|>?")


def test_the_patches_of_a_token_are_neighbours(gemma4):
    """The patches that the tower gets, at the places that it gets, are those of the processor."""
    read = gemma4.pictures.read(noise(60, 200))
    ids, at = np.array([[9, *[IMAGE4] * read.tokens, 9]]), read.arrays["image_position_ids"]
    batch = {"input_ids": ids, "pixel_values": read.arrays["pixel_values"], "image_position_ids": at[None]}
    inputs = vlkv.Inputs.from_hf(batch, CONFIG4)
    place, pixels = inputs.layout["place"][0], inputs.pixels[0]
    own = place[:, 0] >= 0
    wanted = dict(zip(map(tuple, at.tolist()), read.arrays["pixel_values"][0], strict=True))
    assert own.sum() == read.tokens * MERGE**2
    for (line, column), values in zip(place[own].tolist(), pixels[own], strict=True):
        np.testing.assert_array_equal(values, wanted[column, line])
    tokens = place[own].reshape(-1, MERGE**2, 2) // MERGE
    assert (tokens == tokens[:, :1]).all()
    index = inputs.vision_index[0, 1 : 1 + read.tokens]
    np.testing.assert_array_equal(tokens[index, 0], inputs.grid[0, 1 : 1 + read.tokens, 1:])
