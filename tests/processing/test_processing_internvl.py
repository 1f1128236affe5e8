"""InternVL's tilings, prompts and conversations; `test_every_processor.py` has its images."""

import json

import numpy as np
import PIL.Image
import pytest
from tokenizers import processors

from tests.processing.conftest import byte_tokenizer, noise, spelled, write_files
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.internvl import CONVERSATIONS
from vlkv.processing import Processor, Video

SPECIAL = ["<s>", "<img>", "</img>", "<IMG_CONTEXT>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>"]
IMAGE = SPECIAL.index("<IMG_CONTEXT>")
SIDE, TOKENS = 28, 4
SETTINGS = {
    "image_processor_type": "GotOcr2ImageProcessorFast", "crop_size": None, "do_center_crop": None, "resample": 3,
    "size": {"height": SIDE, "width": SIDE}, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    "min_patches": 1, "max_patches": 12, "crop_to_patches": False,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% elif c.type == 'video' %}"
    "{{ '<video>\\n' }}{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLM = dict(
    model_type="qwen2", vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=5,
)  # fmt: skip
VISION = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=SIDE, patch_size=7
)
HF = dict(model_type="internvl", text_config=LLM, vision_config=VISION, image_token_id=IMAGE)
ORIGINAL = dict(
    model_type="internvl_chat", llm_config=LLM, vision_config=VISION, template="internlm2-chat", ps_version="v2",
    dynamic_image_size=True, use_thumbnail=True, max_dynamic_patch=12,
)  # fmt: skip


@pytest.fixture
def tokenizer():
    made = byte_tokenizer(SPECIAL)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


@pytest.fixture
def hf(tmp_path, tokenizer):
    write_files(tmp_path, tokenizer, preprocessor_config=SETTINGS, chat_template=TEMPLATE)
    return Processor.from_folder(tmp_path, config_from_hf(HF))


@pytest.fixture
def original(tmp_path, tokenizer):
    write_files(tmp_path, tokenizer, chat_template="not this one", preprocessor_config=SETTINGS)
    added = {name: i for i, name in enumerate(SPECIAL)}
    return lambda **changes: Processor.from_folder(tmp_path, config_from_hf({**ORIGINAL, **changes}, added=added))


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
def test_conversations_of_the_authors(original, name):
    """System turn, question, answer: an opening and the separator for each. The folder's own template is not used."""
    processor = original(template=name)
    inputs = processor(noise(28, 28), "what?")
    c = CONVERSATIONS[name]
    tiles = "<img>" + "<IMG_CONTEXT>" * TOKENS + "</img>"
    wanted = "<s>" + c["system"] + c["separator"] + c["user"] + tiles + "\nwhat?" + c["separator"] + c["assistant"]
    assert spelled(processor, inputs) == wanted
    assert processor.config.stop == (SPECIAL.index("<|end|>" if name == "phi3-chat" else "<|im_end|>"),)
    assert "InternVL" in wanted and ("\n<|im_start|>user\n" in wanted) == (name == "internvl2_5")


def test_settings_of_an_original(original):
    image = noise(60, 29)
    assert original()(image, "a").is_vision.sum() == 3 * TOKENS
    assert original(use_thumbnail=False)(image, "a").is_vision.sum() == 2 * TOKENS
    assert original(dynamic_image_size=False)(image, "a").is_vision.sum() == TOKENS
    assert original(min_dynamic_patch=3)(image, "a").is_vision.sum() > 3 * TOKENS


def test_what_is_refused(hf, original, tmp_path):
    with pytest.raises(InputError, match="<IMG_CONTEXT>"):
        hf(noise(28, 28), "what is <IMG_CONTEXT>?")
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(InputError, match=r"only tokenizer\.model: `vlkv convert` converts it"):
        original()


def test_a_video_has_the_settings_of_the_video_processor(tmp_path, hf):
    own = {"video_processor_type": "InternVLVideoProcessor", "size": {"height": SIDE, "width": SIDE},
           "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}  # fmt: skip
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    pictures = config_from_hf(HF).open_pictures(tmp_path, "checkpoint")
    grey = PIL.Image.new("RGB", (SIDE, SIDE), (51, 51, 51))
    frame = pictures.read(Video([grey])).arrays["pixel_values"][0, :, 0, 0]
    np.testing.assert_allclose(frame, (0.2 - np.array([0.1, 0.2, 0.3])) / [0.4, 0.5, 0.6], atol=1e-6)
    image = pictures.read(grey).arrays["pixel_values"]
    np.testing.assert_array_equal(image, hf.pictures.read(grey).arrays["pixel_values"])
    np.testing.assert_array_equal(hf.pictures.read(Video([grey])).arrays["pixel_values"], image)
    for change, says in (({"size": {"height": 14, "width": 14}}, "different checkpoints"),
                         ({"do_resize": False}, "do_resize=False"),
                         ({"do_normalize": "no"}, "must be true or false"),
                         ({"video_processor_type": "OtherVideoProcessor"}, "not supported")):  # fmt: skip
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**own, **change}))
        with pytest.raises(InputError, match=says):
            config_from_hf(HF).open_pictures(tmp_path, "checkpoint")
