"""What is special about EVE: windows of a picture. `test_every_family.py` has the rest."""

import json
import math

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.families.common_originals import eve_config, tokens_of
from tests.processing.conftest import make_tokenizer
from vlkv.families import config_from_hf


def test_grid_by_hand(saved):
    inputs = saved("eve").inputs()
    own = inputs.grid[0][inputs.is_vision[0]].tolist()
    assert own == [[0, -1, -1], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, -1, -1], [0, 1, 0], [0, 1, 1], [0, 1, 2],
                   [0, -1, -1]]  # fmt: skip
    second = inputs.grid[1][inputs.is_vision[1]]
    assert second[:, 0].tolist() == [0] * 11 + [1] * 6
    assert second[11:].tolist() == [[1, -1, -1], *[[1, 0, x] for x in range(4)], [1, -1, -1]]


@pytest.mark.parametrize("longest", [672, 1344])
def test_sizes_as_the_authors_code_computes_them(tmp_path, longest):
    """Its lengths are counted at the teacher's 336 pixels, then multiplied."""
    config = config_from_hf(eve_config(mm_vision_tower=f"openai/eve-patch14-anypixel-{longest}"))
    pictures = config.open_pictures(tmp_path, "checkpoint")
    ratio = longest // 336
    for width, height in np.random.default_rng(0).integers(1, 1500, (200, 2)).tolist():
        if width > height:
            wanted = 336, math.ceil(336 * height / width / 14) * 14
        else:
            wanted = math.ceil(336 * width / height / 14) * 14, 336
        assert pictures.vision.target(width, height) == (wanted[0] * ratio, wanted[1] * ratio)


def test_a_picture_and_its_prompt(saved, tmp_path):
    make_tokenizer("<pad>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(
        json.dumps(eve_config(saved("eve").model, vocab_size=260, max_position_embeddings=2048))
    )
    processor = vlkv.load_processor(tmp_path)
    rng = np.random.default_rng(0)
    picture = PIL.Image.fromarray(rng.integers(0, 256, (60, 200, 3), dtype=np.uint8))
    pixels = processor.pictures.read(picture).arrays["pixel_values"][0]
    lines = math.ceil(24 * 60 / 200)
    shown = np.asarray(picture.resize((672, 28 * lines))) / 255  # bicubic, as PIL resizes by itself
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    top = (24 - lines) // 2 * 28
    wanted = ((shown - mean) / std).transpose(2, 0, 1)
    np.testing.assert_allclose(pixels[:3, top : top + 28 * lines], wanted, atol=1e-5)
    assert pixels[3].sum() == 672 * 28 * lines and pixels[3, top : top + 28 * lines].all()
    inputs = processor([picture, picture], "What are these?")
    assert inputs.is_vision.sum() == 2 * tokens_of(lines, 24)
    text = inputs.tokens[0][inputs.valid[0] & ~inputs.is_vision[0]].tolist()
    assert processor.decode(text) == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: \n\nWhat are these? ASSISTANT:"
    )
