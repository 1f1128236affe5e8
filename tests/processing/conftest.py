"""A tiny LLaVA folder (tokenizer, template, image settings), made with the `tokenizers` package alone."""

import json
import struct
import zlib

import numpy as np
import PIL.Image
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.families import tiny
from vlkv.families import config_from_hf

SPECIAL = ["<unk>", "<s>", "</s>", "<image>"]
IMAGE = SPECIAL.index("<image>")
SIDE, PATCH = 28, 7  # 16 vision tokens per image
# The shape of llava-1.5-hf's template: all images first, then the text.
LLAVA_TEMPLATE = """\
{% for message in messages %}
{{ message['role'].upper() + ': ' }}
{%- for item in message['content'] if item['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}
{%- for item in message['content'] if item['type'] == 'text' %}{{ item['text'] + ' ' }}{% endfor %}
{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""


def byte_tokenizer(special) -> Tokenizer:
    """A tokenizer with one token per byte, so that it can encode and decode every text, after the special tokens."""
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_tokenizer(image_token="<image>", bos=True) -> Tokenizer:
    tokenizer = byte_tokenizer([image_token if token == "<image>" else token for token in SPECIAL])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def noise(width, height, seed=0) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8))


def png_header(width: int, height: int) -> bytes:
    """A picture that claims to be enormous."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    data = b"IDAT" + zlib.compress(b"\0")
    return head + struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))


def spelled(processor, inputs, row=0) -> str:
    """The text of a row with all special tokens."""
    return processor.tokenizer.tokenizer.decode(inputs.tokens[row][inputs.valid[row]], skip_special_tokens=False)


def image_settings(**changes):
    return {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True, "do_resize": True,
        "size": {"shortest_edge": SIDE}, "resample": 3, "do_center_crop": True,
        "crop_size": {"height": SIDE, "width": SIDE}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711], **changes,
    }  # fmt: skip


def write_folder(folder, *, template=LLAVA_TEMPLATE, image_token="<image>", bos=True):
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(image_token, bos).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": image_settings()}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_files(folder, tokenizer, **files):
    """A tokenizer and other files: `name=content`, with a text for a template and fields for JSON."""
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (folder / f"{name}.jinja").write_text(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def tiny_config(family, text=None, **fields):
    """The tiny config of a family with a vocabulary for bytes, many positions, and other fields."""
    raw = {**tiny.RAW[family], "model_type": family, **fields}
    more = dict(vocab_size=300, max_position_embeddings=65536) | (text or {})
    return config_from_hf(raw | ({"text_config": raw["text_config"] | more} if "text_config" in raw else more))


TEXT_CONFIG = dict(
    model_type="llama", vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, max_position_embeddings=2048, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="session")
def config():
    vision = dict(model_type="clip_vision_model", hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                  num_attention_heads=2, image_size=SIDE, patch_size=PATCH)  # fmt: skip
    return config_from_hf(
        dict(model_type="llava", text_config=TEXT_CONFIG, vision_config=vision, image_token_index=IMAGE)
    )


@pytest.fixture(scope="session")
def text_config():
    return config_from_hf(TEXT_CONFIG)


@pytest.fixture
def make_folder(tmp_path):
    """A function that writes a checkpoint folder without weights."""
    return lambda **options: write_folder(tmp_path / "checkpoint", **options)
