"""Prompts and marks of Gemma 3 and Gemma 4; `test_every_processor.py` has their images."""

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
