"""Fields of a folder in which classes of transformers differ, or that it leaves out or spells in another way."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.families import forms, tiny
from tests.families.tiny import FAMILIES, RAW
from tests.parity.conftest import transformers
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.llava_next import _height_first
from vlkv.processing.prompts import PromptWriter
from vlkv.processing.templates import ChatTemplate
from vlkv.towers.native import corners

WINDOW = dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)
LLAVA = dict(text_config=dict(model_type="llama", **forms.DECODER), image_token_index=forms.IMAGE)

# Families whose decoder may have windows; the others ignore the fields.
WITH_WINDOWS = ("gemma3", "gemma4", "internvl", "llava_next", "llava_next_video", "llava_onevision")


def read(kind: str, **fields):
    raw = tiny.RAW[kind] if kind in tiny.RAW else dict(forms.DECODER, head_dim=8, **forms.EXPERTS)
    return config_from_hf({**raw, "model_type": kind, **fields})


@pytest.mark.parametrize(
    ("kind", "fields", "windows"),
    [
        ("llama", {**WINDOW, "layer_types": ["sliding_attention"] * 2}, ()),
        ("mistral", WINDOW, (9, 9)),
        ("mistral", {**WINDOW, "sliding_window": None}, ()),
        ("qwen2", WINDOW, (None, 9)),
        ("qwen2", {**WINDOW, "use_sliding_window": False}, ()),
        ("qwen3", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, (9, None)),
        ("qwen3_moe", WINDOW, (9, 9)),
        ("qwen3_moe", {**WINDOW, "use_sliding_window": False}, ()),
        ("qwen2_vl", WINDOW, (None, 9)),
        *[(kind, {"text_config": {**tiny.RAW[kind]["text_config"], **WINDOW}}, ())
          for kind in RAW if "text_config" in RAW[kind] and kind not in WITH_WINDOWS],
    ],
)  # fmt: skip
def test_windows_are_those_of_the_class(kind, fields, windows):
    assert read(kind, **fields).decoder.windows == windows


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen2_vl"])
def test_null_is_the_number_of_heads(kind):
    theirs = transformers.AutoConfig.for_model(kind, num_attention_heads=4, num_key_value_heads=None)
    assert read(kind, num_key_value_heads=None).decoder.kv_heads == theirs.get_text_config().num_key_value_heads == 4


@pytest.mark.parametrize("given", [{}, {"vision_config": None}, {"vision_config": {}}])
@pytest.mark.parametrize("kind", ["llava", "llava_next"])
def test_a_tower_that_the_file_leaves_out(kind, given):
    theirs = transformers.AutoConfig.for_model(kind, **given).vision_config
    vision = config_from_hf({"model_type": kind, "image_grid_pinpoints": [[672, 672]], **LLAVA, **given}).vision
    assert (vision.width, vision.layers, vision.image_size, vision.patch_size) == (
        theirs.hidden_size, theirs.num_hidden_layers, theirs.image_size, theirs.patch_size)  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm_ocr"])
def test_other_names_of_a_towers_fields(kind):
    vision = {**tiny.RAW[kind]["vision_config"], "num_attention_heads": 1, "rope_theta": 50.0}
    made = read(kind, vision_config=vision).vision
    assert (made.heads, made.theta) == (1, 50.0)
    assert read(kind, vision_config={**vision, "rope_scaling": {"rope_theta": 77.0}}).vision.theta == 77.0


@pytest.mark.parametrize(("kind", "fields", "said"), [
    *[("qwen2", {"is_causal": value}, "is_causal") for value in (False, None, 0)],
    *[(kind, {"is_causal": None}, "is_causal") for kind in ("gemma3_text", "qwen3_5_text", "llama")],
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window must be true"),
    ("gemma3_text", {"rope_scaling": {"type": "yarn", "factor": 8.0}}, "as rope_type, not as type"),
    ("gemma3", {"text_config": {"model_type": "qwen2"}}, "text_config.model_type"),
    ("qwen3_vl", {"vision_config": {"rope_scaling": {"rope_type": "linear"}}}, "rope_scaling.rope_type"),
])  # fmt: skip
def test_what_is_refused(kind, fields, said):
    with pytest.raises(InputError, match=said):
        read(kind, **fields)


def test_biases_that_a_class_does_not_have():
    for kind, bias in (("mistral", False), ("phi3", False), ("llama", True), ("qwen3", True)):
        assert read(kind, attention_bias=True).decoder.qkv_bias is bias


def test_positions_in_a_batch_of_transformers():
    config = read("llama")
    ids = np.arange(5, 30)[None]
    for same in (np.arange(25)[None], np.arange(25)):
        vlkv.Inputs.from_hf({"input_ids": ids, "position_ids": same}, config)
    for other in (np.arange(25)[None] * 3, np.arange(24)[None], np.arange(25)[None] + 1):
        with pytest.raises(InputError, match="position_ids"):
            vlkv.Inputs.from_hf({"input_ids": ids, "position_ids": other}, config)
    with pytest.raises(InputError, match="inputs_embeds"):
        vlkv.Inputs.from_hf({"input_ids": ids, "inputs_embeds": np.zeros((1, 25, 32))}, config)


def test_a_tokenizer_without_tools_in_its_template():
    """transformers passes none for `tools` and `documents`, so a template may ask for that."""
    text = "{{ tools is none }} {{ documents == none }} {{ tools | tojson }}"
    assert ChatTemplate.from_text(text, "test").render([], {}) == "True True null"


def changed(family, part, **fields):
    raw = copy.deepcopy(tiny.RAW[family])
    raw[part] |= fields
    return config_from_hf({**raw, "model_type": family})


def test_a_range_of_tiles_need_not_begin_with_a_square():
    assert _height_first("(1x2),...,(2x3)", 10) == [[20, 10], [30, 10], [20, 20], [30, 20]]


def test_the_first_block_may_have_full_attention():
    assert changed("qwen2_5_vl", "vision_config", fullatt_block_indexes=[0, 1]).vision.full == (0, 1)
    with pytest.raises(InputError, match="must be indices of blocks"):
        changed("qwen2_5_vl", "vision_config", fullatt_block_indexes=[-1])


def test_the_padding_token_has_a_row_of_the_table_of_layer_inputs():
    rows = tiny.RAW["gemma4"]["text_config"]["vocab_size_per_layer_input"]
    changed("gemma4", "text_config", pad_token_id=rows - 1)
    with pytest.raises(InputError, match=f"exceed pad_token_id={rows}"):
        changed("gemma4", "text_config", pad_token_id=rows)


def test_a_picture_of_one_line_has_the_first_positions_of_the_table():
    index, weight = corners(jnp.array([[[0, 0], [0, 1], [0, 2]]]), 3)
    np.testing.assert_array_equal(weight, [[[1, 0, 0, 0]] * 3])
    np.testing.assert_array_equal(index[0, :, 0], [0, 1, 2])


LAYERS = 60

READ = {"gemma4": "full_attention or sliding_attention", "qwen3_5": "linear_attention or full_attention",
        "llava_onevision": "full_attention or sliding_attention"}  # fmt: skip

BAD = {
    "another kind": (["full_attention"] * 59 + ["chunked_attention"], "'chunked_attention'"),
    "too few": (["full_attention"] * 59, "59 layers"),
    "none": ([], "0 layers"),
    "no texts": ([["full_attention"]] * LAYERS, r"\['full_attention'\]"),
    "one text": ("full_attention " * LAYERS, "'full_attention full_attention "),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("family", READ)
def test_a_bad_list_is_named_in_one_line(family, bad):
    types, said = BAD[bad]
    message = rf"layer_types must be a list of {LAYERS} layers, each {READ[family]}, not {said}"
    with pytest.raises(InputError, match=message) as error:
        changed(family, "text_config", num_hidden_layers=LAYERS, layer_types=types)
    assert len(str(error.value)) <= 200


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_a_chat_template(family, tmp_path):
    config = config_from_hf({**RAW[family], "model_type": family})
    prompt = tiny.TINY[family].prompt
    if prompt is None:
        with pytest.raises(InputError, match=f"no chat template, and the format of {family}"):
            config.template(tmp_path)
        return
    writer = PromptWriter(template=config.template(tmp_path), image_token="[I]", special={})
    assert writer.write("what?", 1, then=[("yes", "why?")]) == prompt


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
