"""Presets: as many parameters as were published, counted from the config in this file's own words."""

from __future__ import annotations

import jax
import pytest

import vlkv
from vlkv import models

# As published; those of llava-1.5-13b and of LLaVA-OneVision are what transformers makes of their configs.
PUBLISHED = {
    "llava-next-vicuna-7b": 7_063_431_168,
    "llava-next-vicuna-13b": 13_351_499_776,
    "llava-next-mistral-7b": 7_566_747_648,
    "llava-onevision-0.5b": 893_675_552,
    "llava-onevision-7b": 8_030_807_584,
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "llava-1.5-7b": 7_063_427_072,
    "llava-1.5-13b": 13_351_494_656,
    "vicuna-1.5-7b": 6_738_415_616,
    "vicuna-1.5-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
}


def text(raw) -> int:
    d, f, layers = raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"]
    kv = d // raw["num_attention_heads"] * raw["num_key_value_heads"]
    bias = d + 2 * kv if raw["model_type"] == "qwen2" else 0
    tables = 1 if raw["tie_word_embeddings"] else 2
    return layers * (2 * d * d + 2 * d * kv + bias + 3 * d * f + 2 * d) + d + tables * raw["vocab_size"] * d


def clip_block(raw) -> int:
    d, f = raw["hidden_size"], raw["intermediate_size"]
    return 4 * (d * d + d) + d * f + f + f * d + d + 4 * d


def clip(raw) -> int:
    """All of it: patches without a bias, class token, positions, a norm before and one after."""
    d, patches = raw["hidden_size"], (raw["image_size"] // raw["patch_size"]) ** 2
    around = 3 * raw["patch_size"] ** 2 * d + d + (patches + 1) * d + 4 * d
    return around + raw["num_hidden_layers"] * clip_block(raw)


def whole(raw) -> int | None:
    """None: of a family that only transformers counts here."""
    if "vision_config" not in raw:
        return text(raw)
    if raw["model_type"] not in ("llava", "llava_next"):
        return None
    sizes = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
    sizes |= {"num_key_value_heads": 32, "tie_word_embeddings": False} | raw["text_config"]
    d, width = sizes["hidden_size"], raw["vision_config"]["hidden_size"]
    newline = d if raw["model_type"] == "llava_next" else 0
    return text(sizes) + clip(raw["vision_config"]) + width * d + d + d * d + d + newline


def unused(raw) -> int:
    """What is published and never runs: a norm behind the tower; with feature layer -2 the last block too."""
    if raw["model_type"] in ("llava", "llava_next"):
        return clip_block(raw["vision_config"]) + 2 * raw["vision_config"]["hidden_size"]
    return 2 * raw["vision_config"]["hidden_size"] if raw["model_type"] == "llava_onevision" else 0


@pytest.mark.parametrize("name", vlkv.presets)
def test_parameters_are_as_many_as_published(name):
    raw = vlkv.presets.raw[name]
    assert whole(raw) in (PUBLISHED[name], None)
    shapes = jax.tree.leaves(models.abstract(vlkv.presets[name]))
    assert sum(x.size for x in shapes) == PUBLISHED[name] - unused(raw)


COUNTED = [name for name in vlkv.presets if "vision_config" in vlkv.presets.raw[name]]


@pytest.mark.parametrize("name", [*COUNTED, "mistral-7b", "qwen2-1.5b"])
def test_transformers_counts_as_many(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    raw = dict(vlkv.presets.raw[name])
    auto = transformers.AutoModelForImageTextToText if name in COUNTED else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.for_model(raw.pop("model_type"), **raw))
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_a_preset_that_is_not_there():
    with pytest.raises(vlkv.InputError, match=r"no preset 'llava-1\.5-70b': did you mean llava-1\.5-7b\?"):
        vlkv.presets["llava-1.5-70b"]
    assert "llava-1.5-7b" in vlkv.presets and "gpt" not in vlkv.presets
