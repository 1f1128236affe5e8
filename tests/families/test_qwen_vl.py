"""What is special about Qwen-VL: its prompts. `test_every_family.py` has the rest."""

import json

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.families.common_originals import LENGTH, QWEN_SIDE, TOKENS, qwen_config
from tests.processing.conftest import make_tokenizer
from vlkv.errors import InputError


def test_prompts_beyond_the_trained_length_are_refused(saved):
    with pytest.raises(InputError, match=f"limit is {LENGTH}"):
        vlkv.Inputs.from_hf({"input_ids": [[5] * (LENGTH + 1)]}, saved("qwen_vl").params.config)


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_as_the_authors_write_them(tmp_path, chat):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    start = tokenizer.token_to_id("<img>")
    raw = qwen_config(vocab_size=300, seq_length=2048)
    raw["visual"]["image_start_id"] = start
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if chat:
        (tmp_path / "generation_config.json").write_text(json.dumps({"chat_format": "chatml"}))
    processor = vlkv.load_processor(tmp_path)
    rng = np.random.default_rng(0)
    picture = PIL.Image.fromarray(rng.integers(0, 256, (30, 50, 3), dtype=np.uint8))
    inputs = processor([picture, picture], "What?")
    pads = "<imgpad>" * TOKENS
    text = f"Picture 1: <img>{pads}</img>\nPicture 2: <img>{pads}</img>\nWhat?"
    if chat:
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"{text}<|im_end|>\n<|im_start|>assistant\n"
        )
    assert inputs.tokens[0][inputs.valid[0]].tolist() == tokenizer.encode(text).ids
    assert inputs.is_vision.sum() == 2 * TOKENS
    grid = inputs.grid[0][inputs.is_vision[0]]
    assert grid.tolist() == [[i, y, x] for i in range(2) for y in range(4) for x in range(4)]
    # torchvision's Resize on PIL, ToTensor and Normalize.
    shown = np.asarray(picture.resize((QWEN_SIDE, QWEN_SIDE), PIL.Image.Resampling.BICUBIC)) / 255
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    np.testing.assert_allclose(inputs.pixels[0], ((shown - mean) / std).transpose(2, 0, 1), atol=1e-5)


def test_a_tiktoken_file_alone_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(qwen_config()))
    (tmp_path / "qwen.tiktoken").write_text("")
    with pytest.raises(InputError, match=r"only qwen\.tiktoken: `vlkv convert` converts it"):
        vlkv.load_processor(tmp_path)
