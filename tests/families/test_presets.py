"""Presets have as many parameters as were published."""

from __future__ import annotations

import pytest

import vlkv
from vlkv import families
from vlkv.tools.planning import arithmetic

# As published; those of llava-1.5-13b, LLaVA-OneVision and NeXT-Video are what transformers makes of their configs, and
# those of MobileVLM-V2 and EVE what was counted by hand. GLM-OCR and Qwen3.5 without the layer that predicts further
# tokens; those of Qwen3.5 are what transformers makes of our configs.
PUBLISHED = {
    "llava-1.5-7b": 7_063_427_072,
    "llava-1.5-13b": 13_351_494_656,
    "llava-next-vicuna-7b": 7_063_431_168,
    "llava-next-vicuna-13b": 13_351_499_776,
    "llava-next-mistral-7b": 7_566_747_648,
    "llava-next-video-7b": 7_063_431_168,
    "llava-onevision-0.5b": 893_675_552,
    "llava-onevision-7b": 8_030_807_584,
    "llava-video-7b": 8_030_348_832,
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2-vl-72b": 73_405_560_320,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-72b": 73_410_777_344,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-32b": 33_357_390_064,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
    "qwen3.5-0.8b": 852_985_920,
    "qwen3.5-2b": 2_213_241_664,
    "qwen3.5-4b": 4_539_265_536,
    "qwen3.5-9b": 9_409_813_744,
    "qwen3.5-27b": 27_356_728_560,
    "qwen3.5-35b-a3b": 35_107_181_936,
    "qwen3.5-122b-a10b": 122_562_817_776,
    "qwen3.5-397b-a17b": 396_802_360_816,
    "glm-4.1v-9b": 10_292_777_472,
    "glm-4.6v-flash": 10_292_777_472,
    "glm-ocr": 1_107_405_824,
    "internvl-1.5-26b": 25_514_186_112,
    "internvl2-1b": 938_158_976,
    "internvl2-2b": 2_205_754_368,
    "internvl2-4b": 4_146_855_936,
    "internvl2-8b": 8_075_365_376,
    "internvl2-26b": 25_514_186_112,
    "internvl2.5-8b": 8_075_365_376,
    "internvl3-1b": 938_193_024,
    "internvl3-2b": 2_088_957_440,
    "internvl3-8b": 7_944_373_760,
    "internvl3.5-1b": 1_060_897_792,
    "internvl3.5-2b": 2_348_347_392,
    "internvl3.5-4b": 4_732_489_216,
    "internvl3.5-8b": 8_528_318_464,
    "internvl3.5-14b": 15_119_523_840,
    "internvl3.5-38b": 38_390_405_504,
    "internvl3.5-30b-a3b": 30_848_730_112,
    "internvl3.5-241b-a28b": 240_699_370_368,
    "smolvlm-256m": 256_484_928,
    "smolvlm-500m": 507_482_304,
    "smolvlm-2.2b": 2_246_272_880,
    "smolvlm2-256m": 256_484_928,
    "smolvlm2-500m": 507_482_304,
    "smolvlm2-2.2b": 2_246_784_880,
    "idefics3-8b": 8_462_086_384,
    "mobilevlm-v2-1.7b": 1_674_121_216,
    "mobilevlm-v2-3b": 3_014_273_536,
    "mobilevlm-v2-7b": 7_062_943_744,
    "paddleocr-vl-0.9b": 905_601_648,
    "qwen-vl": 9_656_935_168,
    "eve-7b": 6_768_398_336,
    "eve-7b-hd": 6_768_398_336,
    "vicuna-1.5-7b": 6_738_415_616,
    "vicuna-1.5-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "phi-3-mini": 3_821_079_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "gemma4-e2b": 4_797_114_083,
    "gemma4-e4b": 7_632_344_554,
    "gemma4-26b-a4b": 25_805_936_206,
    "gemma4-31b": 31_273_088_876,
    "internlm2-7b": 7_737_708_544,
}
# Published, but never run: CLIP's last block and the norm behind it, SigLIP's norm.
UNUSED = {**dict.fromkeys(("llava", "llava_next", "llava_next_video", "mobilevlm"), 12_598_272),
          **dict.fromkeys(("llava_onevision", "llava_qwen"), 2304)}  # fmt: skip


@pytest.mark.default(
    "llava-1.5-7b", "llava-next-mistral", "llava-onevision-0.5b", "llava-video", "qwen2-vl-2b", "qwen2.5-vl-3b",
    "qwen3-vl-2b", "qwen3.5-0.8b", "glm-4.1v", "glm-ocr", "internvl2-1b", "internvl2-4b", "internvl3-1b",
    "internvl3.5-1b", "smolvlm-256m", "idefics3", "mobilevlm-v2-1.7b", "paddleocr", "[qwen-vl]", "eve-7b]",
    "llama-3.2-1b", "[mistral-7b]", "qwen3-0.6b", "gemma-3-270m", "gemma4-e2b",
)  # fmt: skip
@pytest.mark.parametrize("name", vlkv.presets)
def test_parameters_are_as_many_as_published(name):
    stored, _ = arithmetic.parameters(vlkv.presets[name])
    assert stored == PUBLISHED[name] - UNUSED.get(families.model_type(vlkv.presets.raw[name]), 0)


def test_glm_ocr_with_its_last_layer_is_as_large_as_published():
    """526 tensors of 1,325,258,240 parameters: one more layer, its projection, norms, embedding table and head."""
    sizes = vlkv.presets.raw["glm-ocr"]["text_config"]
    d, vocabulary, heads = sizes["hidden_size"], sizes["vocab_size"], sizes["head_dim"]
    attention = 2 * d * heads * (sizes["num_attention_heads"] + sizes["num_key_value_heads"])
    layer = attention + 3 * d * sizes["intermediate_size"] + 4 * d
    assert PUBLISHED["glm-ocr"] + layer + 2 * d * d + 3 * d + 2 * vocabulary * d == 1_325_258_240


@pytest.mark.default("qwen3-30b", "qwen3-8b", "gemma4", "qwen3.5-35b")
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22),
        ("qwen3-vl-30b-a3b", 3.9),
        ("qwen3-8b", 8.2),
        ("internvl3.5-241b-a28b", 27.8),
        ("gemma4-26b-a4b", 4.4),
        ("qwen3.5-35b-a3b", 3.9),
        ("qwen3.5-397b-a17b", 17.8),
    ],
)
def test_active_parameters(name, billions):
    """Billions of active parameters in the models' names. The towers have 0.5 billion more."""
    stored, active = arithmetic.parameters(vlkv.presets[name])
    assert stored == PUBLISHED[name]
    assert active / 1e9 == pytest.approx(billions, rel=0.02)


# At least one of each family that transformers has.
COUNTED = [
    "llava-1.5-13b", "llava-next-mistral-7b", "llava-onevision-0.5b", "llava-onevision-7b", "qwen2-vl-2b",
    "qwen2.5-vl-3b", "qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b", "qwen3-vl-32b",
    "qwen3-vl-30b-a3b", "qwen3-vl-235b-a22b", "qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b",
    "qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b", "glm-4.6v-flash", "glm-ocr", "internvl3-1b",
    "internvl3.5-1b",
    "internvl3.5-38b", "internvl3.5-30b-a3b", "smolvlm-256m", "smolvlm2-2.2b", "idefics3-8b", "paddleocr-vl-0.9b",
    "llama-3.2-1b", "mistral-7b", "qwen2-1.5b", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b",
    "gemma-3-4b", "gemma-3-27b", "gemma4-e2b", "gemma4-e4b", "gemma4-26b-a4b", "gemma4-31b",
]  # fmt: skip


@pytest.mark.full
@pytest.mark.ci(
    "llava-next", "llava-onevision-0.5b", "qwen2-vl", "qwen2.5-vl", "qwen3-vl-2b", "qwen3.5-0.8b", "qwen3.5-35b",
    "glm-ocr", "internvl3-1b", "smolvlm-256m", "paddleocr", "gemma4-e4b", "gemma4-26b", "qwen3-30b",
)  # fmt: skip
@pytest.mark.parametrize("name", COUNTED)
def test_transformers_counts_as_many(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    raw = dict(vlkv.presets.raw[name])
    auto = transformers.AutoModelForImageTextToText if "vision_config" in raw else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.for_model(raw.pop("model_type"), **raw))
    saved = set(model.state_dict())  # Gemma 4 also saves buffers, such as the factor of each layer
    buffers = sum(buffer.numel() for key, buffer in model.named_buffers() if key in saved)
    assert sum(parameter.numel() for parameter in model.parameters()) + buffers == PUBLISHED[name]


def test_tokens_of_internvl():
    """256 of each tile, marked by a token within the vocabulary, as is the one that ends an answer."""
    for config in (vlkv.presets[name] for name in vlkv.presets if name.startswith("internvl")):
        assert config.per_picture == 256
        assert all(0 <= token < config.decoder.vocab_size for token in (config.image_token, *config.stop))


def test_a_preset_that_is_not_there():
    with pytest.raises(vlkv.InputError, match=r"no preset 'llava-1\.5-70b': did you mean llava-1\.5-7b\?"):
        vlkv.presets["llava-1.5-70b"]
    assert "llava-1.5-7b" in vlkv.presets and "gpt" not in vlkv.presets
