"""LLaVA-1.5, MobileVLM-V2, EVE and Qwen-VL as their authors publish them; `test_every_family.py` has the rest."""

import json
import math
import shutil

import jax
import numpy as np
import PIL.Image
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import save_file
from tests.families.common_originals import (
    LENGTH,
    QWEN_SIDE,
    TOKENS,
    TOWER,
    eve_config,
    qwen_config,
    tokens_of,
    write_llava,
)
from tests.parity.conftest import torch
from tests.processing.conftest import make_tokenizer
from vlkv.errors import InputError
from vlkv.families import config_from_hf

KINDS = ["llava_llama", "mobilevlm"]


def test_an_adapter_as_the_authors_publish_it(saved, tmp_path):
    """Their config, an adapter of the text model, and what they trained besides: the projector."""
    model, base, source = saved("llava_llama").model, tmp_path / "vicuna", tmp_path / "source"
    model.decoder.save_pretrained(base)
    write_llava(model, source, tower="beside", kind="llava")
    (source / "model.safetensors").unlink()
    part, a, b = "model.layers.1.self_attn.o_proj", torch.randn(4, 48), torch.randn(48, 4)
    adapter = {f"base_model.model.{part}.lora_{side}.weight": x for side, x in (("A", a), ("B", b))}
    torch.save(adapter, source / "adapter_model.bin")
    projector = {f"model.mm_projector.{key}": value + 1 for key, value in model.projector.state_dict().items()}
    trained = {f"base_model.model.{key}": value for key, value in projector.items()}
    torch.save(trained, source / "non_lora_trainables.bin")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(base)}
    (source / "adapter_config.json").write_text(json.dumps(config))
    made = vlkv.load_params(convert(source, tmp_path / "made", progress=False))

    weights = model.tensors() | projector
    weights[f"{part}.weight"] += 2 * (b @ a)
    write_llava(model, tmp_path / "merged", kind="llava")
    save_file(weights, tmp_path / "merged" / "model.safetensors")
    merged = vlkv.load_params(tmp_path / "merged")
    assert made.config == merged.config
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), made, merged)


def test_a_missing_tower_is_refused_with_a_remedy(saved, tmp_path):
    model = saved("llava_llama").model
    write_llava(model, tmp_path, tower="nowhere")
    shutil.rmtree(tmp_path / TOWER)
    with pytest.raises(InputError, match=f"'somewhere/{TOWER}' is not known .*: put its config.json into a folder"):
        vlkv.load_params(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "vision_config": model.tower.config.to_dict()}))
    with pytest.raises(InputError, match=f"contains no vision tower: put the folder {TOWER} "):
        vlkv.load_params(tmp_path)


def test_published_towers_are_known_by_name():
    config = config_from_hf(
        dict(model_type="mobilevlm", mm_vision_tower="openai/clip-vit-large-patch14-336", mm_projector_type="ldpnetv2",
             vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16)
    )  # fmt: skip
    assert (config.vision.grid, config.vision.blocks, config.side, config.image_token) == (24, 23, 12, 32000)


@pytest.fixture(scope="module", params=KINDS)
def processor(request, saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    write_llava(saved(request.param).model, folder, vocab_size=259)
    tokenizer = make_tokenizer("<pad>")
    tokenizer.save(str(folder / "tokenizer.json"))
    return vlkv.load_processor(folder), tokenizer


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
