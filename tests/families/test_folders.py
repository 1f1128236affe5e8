"""What a folder leaves out or spells in another way: prompt formats, stop tokens and token ids."""

import pytest

from tests.families.tiny import FAMILIES, RAW
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.internvl.conversations import CONVERSATIONS
from vlkv.processing.prompts import PromptWriter

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. USER: [I]\nwhat? ASSISTANT: yes</s>USER: why? ASSISTANT:"
)
QWEN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
CHATML = (
    "<|im_start|>user\n{image}what?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
)
SHANGHAI = CONVERSATIONS["internlm2-chat"].system + "<|im_end|>"
PROMPTS = {
    "llava": "USER: [I]\nwhat? ASSISTANT: yes</s>USER: why? ASSISTANT:",
    **dict.fromkeys(("llava_llama", "mobilevlm", "eve"), VICUNA),
    **dict.fromkeys(("llava_onevision", "llava_qwen"), QWEN + CHATML.format(image="[I]\n")),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"), QWEN + CHATML.format(image="<|vision_start|><|image_pad|><|vision_end|>")
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        CHATML.format(image="<|vision_start|><|image_pad|><|vision_end|>"),
    ),
    "internvl": CHATML.format(image="[I]\n"),
    "internvl_chat": SHANGHAI + CHATML.format(image="[I]\n").replace("<|im_end|>\n", "<|im_end|>"),
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        "<|im_start|>User:<image>what?<end_of_utterance>\nAssistant: yes"
        "<end_of_utterance>\nUser: why?<end_of_utterance>\nAssistant:",
    ),
    "paddleocr_vl": (
        "<|begin_of_sentence|>User: <|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>what?\nAssistant: yes</s>"
        "User: why?\nAssistant: "
    ),
    "gemma3": (
        "<bos><start_of_turn>user\n<start_of_image>what?<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n"
        "<start_of_turn>user\nwhy?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "gemma4": (
        "<bos><|turn>user\n<|image|>what?<turn|>\n<|turn>model\nyes<turn|>\n<|turn>user\nwhy?<turn|>\n<|turn>model\n"
    ),
    "qwen": "Picture 1: <img><imgpad></img>\nwhat?yeswhy?",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_a_chat_template(family, tmp_path):
    config = config_from_hf({**RAW[family], "model_type": family})
    if family not in PROMPTS:
        with pytest.raises(InputError, match=f"no chat template, and the format of {family}"):
            config.template(tmp_path)
        return
    writer = PromptWriter(template=config.template(tmp_path), image_token="[I]", special={})
    assert writer.write("what?", 1, then=[("yes", "why?")]) == PROMPTS[family]


@pytest.mark.parametrize("text", [{}, {"eos_token_id": None}, {"eos_token_id": 7}, {"eos_token_id": [7, 8]}], ids=str)
@pytest.mark.parametrize("outer", [{}, {"eos_token_id": None}, {"eos_token_id": 5}, {"eos_token_id": [5, 6]}], ids=str)
def test_stop_tokens_without_a_generation_config_are_those_of_transformers(outer, text):
    transformers = pytest.importorskip("transformers")
    part = {key: value for key, value in RAW["llava"]["text_config"].items() if key != "eos_token_id"} | text
    raw = {**RAW["llava"], **outer, "text_config": part, "model_type": "llava"}
    wanted = transformers.GenerationConfig.from_model_config(transformers.LlavaConfig.from_dict(raw)).eos_token_id
    wanted = () if wanted is None else tuple(wanted) if isinstance(wanted, list) else (wanted,)
    assert config_from_hf(raw).stop == wanted


def test_stop_tokens_of_the_generation_config():
    raw = {**RAW["llava"], "model_type": "llava", "eos_token_id": 5}
    assert config_from_hf(raw, {"eos_token_id": [3, 4]}).stop == (3, 4)
    assert config_from_hf(raw, {"eos_token_id": []}).stop == ()
    assert config_from_hf(raw, {"eos_token_id": None}).stop == (5,), "null: look further"
    assert config_from_hf(raw, {}).stop == (5,)
    for bad in ("2", 2.0, [2.5], True, [[2]], -1, {"a": 2}):
        with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id=.* must be a token id"):
            config_from_hf(raw, {"eos_token_id": bad})


@pytest.mark.parametrize("value", [[], 2.5, "5", True, -1, {}], ids=str)
@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("llava", "image_token_index"), ("llava", "image_token_id"), ("llava_onevision", "video_token_index"),
        ("llava_qwen", "image_token_index"), ("internvl", "image_token_id"), ("qwen2_vl", "image_token_id"),
        ("smolvlm", "image_token_id"), ("qwen2_5_vl", "video_token_id"), ("qwen", "eos_token_id"),
        ("qwen", "visual.image_start_id"), ("glm4v", "image_token_id"), ("glm_ocr", "video_end_token_id"),
    ],
)  # fmt: skip
def test_token_ids_that_are_no_whole_numbers(family, field, value):
    raw = {key: part for key, part in RAW[family].items() if "token_i" not in key} | {"model_type": family}
    part, _, leaf = field.rpartition(".")
    raw |= {part: {**raw[part], leaf: value}} if part else {leaf: value}
    with pytest.raises(InputError, match=f"{leaf}=.* must be a token id"):
        config_from_hf(raw)


def test_token_ids_that_are_null_have_their_defaults():
    raw = {key: part for key, part in RAW["llava"].items() if key != "image_token_index"} | {"model_type": "llava"}
    assert config_from_hf(raw | {"image_token_index": None}).image_token == 32000
    assert config_from_hf(raw | {"image_token_index": None, "image_token_id": 7}).image_token == 7
