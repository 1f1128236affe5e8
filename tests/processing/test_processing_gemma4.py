"""Gemma 4's images and marks against transformers' processor on PIL."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
from tokenizers import processors

import vlkv
from tests.processing.conftest import byte_tokenizer, noise
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.processing import Processor, Video

SPECIAL = ["<pad>", "<eos>", "<bos>", "<|image>", "<image|>", "<|image|>", "<|turn>", "<turn|>", "<|audio|>"]
IMAGE, AUDIO = SPECIAL.index("<|image|>"), SPECIAL.index("<|audio|>")
PATCH, MERGE, MOST = 4, 3, 70
SETTINGS = {
    "image_processor_type": "Gemma4ImageProcessor", "do_convert_rgb": True, "do_normalize": False, "do_rescale": True,
    "do_resize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "resample": 3, "rescale_factor": 1 / 255,
    "patch_size": PATCH, "pooling_kernel_size": MERGE, "max_soft_tokens": MOST,
}  # fmt: skip
RAW = dict(
    model_type="gemma4", image_token_id=IMAGE, audio_token_id=AUDIO, video_token_id=299,
    vision_soft_tokens_per_image=MOST,
    text_config=dict(vocab_size=300, hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
                     num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
                     layer_types=["sliding_attention", "full_attention"], vocab_size_per_layer_input=300,
                     use_bidirectional_attention="vision"),
    vision_config=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                       num_key_value_heads=2, head_dim=12, patch_size=PATCH, pooling_kernel_size=MERGE),
)  # fmt: skip


def write_folder(folder, **changes):
    """A tokenizer with one token per byte, which adds no token, and the image settings."""
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", **marks}))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | changes))
    return folder


@pytest.fixture(scope="module")
def theirs():
    """transformers' processors, without the tokenizer and torchvision."""
    pil = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
    text = pytest.importorskip("transformers.models.gemma4.processing_gemma4").Gemma4Processor
    like = types.SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    settings = {name: value for name, value in SETTINGS.items() if name != "image_processor_type"}
    return types.SimpleNamespace(
        read=lambda image, **options: pil.Gemma4ImageProcessorPil(**settings)([image], return_tensors="np", **options),
        text=lambda made: text.replace_image_token(like, made, 0),
    )


@pytest.mark.parametrize("most", [70, pytest.param(280, marks=pytest.mark.full)])
def test_pixels_positions_and_text_of_200_sizes_are_those_of_transformers(tmp_path, theirs, most):
    """Also images so long and thin that one side has no whole token, and images that are not resized."""
    folder = write_folder(tmp_path, max_soft_tokens=most)
    ours = Processor.from_folder(folder, config_from_hf(RAW | {"vision_soft_tokens_per_image": 280})).pictures
    rng, found = np.random.default_rng(0), set()
    sizes = np.exp(rng.uniform(np.log(2), np.log(300), (200, 2))).astype(int).tolist()
    for seed, (width, height) in enumerate([*sizes, (120, 84), (84, 120), (2000, 3), (3, 2000), (1, 1)]):
        image = noise(width, height, seed)
        read, wanted = ours.read(image), theirs.read(image, max_soft_tokens=most)
        np.testing.assert_array_equal(read.arrays["pixel_values"], wanted["pixel_values"])
        np.testing.assert_array_equal(read.arrays["image_position_ids"], wanted["image_position_ids"][0])
        assert read.text == theirs.text(wanted)
        assert read.tokens == wanted["num_soft_tokens_per_image"][0] <= most
        found.add(read.tokens)
    assert len(found) > 15


def test_a_conversation(tmp_path):
    """One <bos>, from the template; each image between its marks, its tokens in lines and columns."""
    processor = Processor.from_folder(write_folder(tmp_path), config_from_hf(RAW))
    inputs = processor([[noise(120, 84), noise(60, 200)], []], ["look <image> and <image> what?", "hi"])
    tokenizer = processor.tokenizer.tokenizer
    texts = [tokenizer.decode(row[valid], skip_special_tokens=False)
             for row, valid in zip(inputs.tokens, inputs.valid, strict=True)]  # fmt: skip
    wide, tall = (processor.pictures.read(noise(*size)).text for size in ((120, 84), (60, 200)))
    assert texts[0] == f"<bos><|turn>user\nlook{wide}and{tall}what?<turn|>\n<|turn>model\n"
    assert texts[1] == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    image, line, column = inputs.grid[0][inputs.is_vision[0]].T
    assert [(line[image == i].max() + 1, column[image == i].max() + 1) for i in (0, 1)] == [(7, 10), (15, 4)]
    np.testing.assert_array_equal(line[image == 0] * 10 + column[image == 0], np.arange(70))
    with pytest.raises(InputError, match="does not support videos"):
        processor([Video([noise(50, 50)])], "what?")
    with pytest.raises(InputError, match="audio is not supported"):
        processor(None, "what is <|audio|>?")


def test_the_patches_of_a_token_are_neighbours(tmp_path):
    """The patches that the tower gets, at the places that it gets, are those of the processor."""
    config = config_from_hf(RAW)
    read = Processor.from_folder(write_folder(tmp_path), config).pictures.read(noise(60, 200))
    ids = np.array([[9, *[IMAGE] * read.tokens, 9]])
    inputs = vlkv.Inputs.from_hf({"input_ids": ids, "pixel_values": read.arrays["pixel_values"],
                                  "image_position_ids": read.arrays["image_position_ids"][None]}, config)  # fmt: skip
    place, pixels = inputs.layout["place"][0], inputs.pixels[0]
    own = place[:, 0] >= 0
    wanted = {tuple(at): values for at, values in zip(read.arrays["image_position_ids"], read.arrays["pixel_values"][0],
                                                      strict=True)}  # fmt: skip
    assert own.sum() == read.tokens * MERGE**2
    for (line, column), values in zip(place[own], pixels[own], strict=True):
        np.testing.assert_array_equal(values, wanted[column, line])
    tokens = place[own].reshape(-1, MERGE**2, 2) // MERGE
    assert (tokens == tokens[:, :1]).all()
    index = inputs.vision_index[0, 1 : 1 + read.tokens]
    np.testing.assert_array_equal(tokens[index, 0], inputs.grid[0, 1 : 1 + read.tokens, 1:])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"patch_size": 16}, "the files belong to different checkpoints"),
        ({"pooling_kernel_size": 2}, "the files belong to different checkpoints"),
        ({"max_soft_tokens": 100}, "max_soft_tokens=100 must be one of 70, 140"),
        ({"max_soft_tokens": 140}, "max_soft_tokens=140 exceeds vision_soft_tokens_per_image=70"),
        ({"do_resize": False}, "do_resize=False is not supported"),
        ({"image_processor_type": "CLIPImageProcessor"}, "not supported"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        Processor.from_folder(write_folder(tmp_path, **changes), config_from_hf(RAW))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image_position_ids": None}, "no image_position_ids"),
        ({"pixel_values": np.zeros((1, 9, 8))}, "pixel_values have shape"),
        ({"image_position_ids": np.zeros((1, 9, 2))}, "must be multiples of 3"),
        ({"image_position_ids": np.indices((3, 3)).reshape(1, 2, 9).swapaxes(1, 2)}, "line by line"),
    ],
    ids=str,
)
def test_arrays_that_do_not_fit(changes, says):
    at = np.indices((3, 3)).reshape(2, -1)[::-1].T[None]
    batch = {"input_ids": [[9, IMAGE, 9]], "pixel_values": np.zeros((1, 9, 3 * PATCH**2)), "image_position_ids": at}
    assert vlkv.Inputs.from_hf(batch, config_from_hf(RAW)).is_vision.sum() == 1
    with pytest.raises(InputError, match=says) as error:
        vlkv.Inputs.from_hf({**batch, **changes}, config_from_hf(RAW))
    assert len(str(error.value)) <= 200
