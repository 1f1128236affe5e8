"""Presets: as many parameters as were published, counted from the config in this file's own words."""

from __future__ import annotations

import jax
import pytest

import vlkv
from vlkv.families import abstract
from vlkv.tools.planning import arithmetic

# As published; those of llava-1.5-13b, LLaVA-OneVision and NeXT-Video are what transformers makes of their configs, and
# those of MobileVLM-V2 and EVE what this file counts. GLM-OCR and Qwen3.5 without the layer that predicts further
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
LLAMA_7B = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                num_key_value_heads=32, tie_word_embeddings=False)  # fmt: skip
# Named, not described, in the original configs: google/siglip-so400m-patch14-384 without its last block.
SIGLIP = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=26, image_size=384, patch_size=14)


CLIP = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, image_size=336, patch_size=14)


def linear(i: int, o: int) -> int:
    """With a bias."""
    return i * o + o


def text(raw, *, bias: bool = False) -> int:
    """A gated decoder; `bias` on queries, keys and values. Qwen3 and Gemma 3 normalise queries and keys by head."""
    d, f, layers = raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"]
    head_dim = raw.get("head_dim", d // raw["num_attention_heads"])
    q, kv = (head_dim * raw.get(f"num_{x}_heads", raw["num_attention_heads"]) for x in ("attention", "key_value"))
    block = 2 * d * q + 2 * d * kv + (q + 2 * kv) * bias + 3 * d * f + 2 * d
    block += 2 * head_dim * raw["model_type"].startswith(("qwen3", "gemma3"))
    block += 2 * d * raw["model_type"].startswith(("gemma3", "glm"))  # norms after attention and MLP
    if "num_experts" in raw:  # in all layers, with a router
        block += raw["num_experts"] * (d + 3 * d * raw["moe_intermediate_size"]) - 3 * d * f
    tables = 1 if raw["tie_word_embeddings"] else 2
    return layers * block + d + tables * raw["vocab_size"] * d


def delta_text(raw, *, tied: bool) -> int:
    """Qwen3.5: three of four layers have the gated delta rule, the others attention with a gate as wide as queries."""
    d, layers, h = raw["hidden_size"], raw["num_hidden_layers"], raw["head_dim"]
    keys, values = (raw[f"linear_num_{x}_heads"] * raw[f"linear_{x}_head_dim"] for x in ("key", "value"))
    delta = (2 * keys + values) * (d + 4) + 2 * values * d + 2 * raw["linear_num_value_heads"] * (d + 1)
    delta += raw["linear_value_head_dim"]
    attention = (3 * raw["num_attention_heads"] + 2 * raw["num_key_value_heads"]) * h * d + 2 * h
    mlp = 3 * d * raw["intermediate_size"]
    if "num_experts" in raw:
        mlp = raw["num_experts"] * (d + 3 * d * raw["moe_intermediate_size"])
        mlp += 3 * d * raw["shared_expert_intermediate_size"] + d
    full = layers // 4
    return (layers - full) * delta + full * attention + layers * (mlp + 2 * d) + d + (2 - tied) * raw["vocab_size"] * d


def block(d: int, f: int) -> int:
    """Of a transformer with biases everywhere and LayerNorm."""
    return 4 * linear(d, d) + linear(d, f) + linear(f, d) + 4 * d


def patches(raw) -> int:
    side = [x if isinstance(x, int) else x[0] for x in (raw["image_size"], raw["patch_size"])]
    return (side[0] // side[1]) ** 2


def clip_block(raw) -> int:
    return block(raw["hidden_size"], raw["intermediate_size"])


def clip(raw) -> int:
    """All of it: patches without a bias, class token, positions, a norm before and one after."""
    d = raw["hidden_size"]
    around = 3 * raw["patch_size"] ** 2 * d + d + (patches(raw) + 1) * d + 4 * d
    return around + raw["num_hidden_layers"] * clip_block(raw)


def siglip(raw) -> int:
    """Patches with a bias, positions, a norm after, no pooling head."""
    d = raw["hidden_size"]
    around = linear(3 * raw["patch_size"] ** 2, d) + patches(raw) * d + 2 * d
    return around + raw["num_hidden_layers"] * block(d, raw["intermediate_size"])


def internvit(raw, *, six: bool) -> int:
    """Patches with a bias, class token, positions, two scales a block; `six`: RMSNorm, queries and keys normalised."""
    d = raw["hidden_size"]
    around = linear(3 * 14**2, d) + d + (patches(raw) + 1) * d
    # Three biases and those of two norms less, norms of queries and keys more.
    per_block = block(d, raw["intermediate_size"]) + 2 * d + (-3 * d - 2 * d + 2 * d) * six
    return around + raw["num_hidden_layers"] * per_block


def qwen2_tower(raw) -> int:
    """Patches of two frames, LayerNorm blocks, a merger of 2 x 2 patches to the decoder's width (`hidden_size`)."""
    d = raw["embed_dim"]
    merger = 2 * d + linear(4 * d, 4 * d) + linear(4 * d, raw["hidden_size"])
    return 2 * 3 * 14**2 * d + raw["depth"] * block(d, 4 * d) + merger


def qwen2_5_tower(raw) -> int:
    """The same with RMSNorm and a gated MLP."""
    d, f = raw["hidden_size"], raw["intermediate_size"]
    blocks = raw["depth"] * (4 * linear(d, d) + 2 * linear(d, f) + linear(f, d) + 2 * d)
    return 2 * 3 * 14**2 * d + blocks + d + linear(4 * d, 4 * d) + linear(4 * d, raw["out_hidden_size"])


def qwen3_tower(raw) -> int:
    """Patches of two frames with a bias, a table of positions, LayerNorm blocks, and four mergers; in Qwen3.5 one.

    The norm of the first merger is over a patch, that of the others over the patches of a token.
    """
    d, f, more = raw["hidden_size"], raw["intermediate_size"], len(raw["deepstack_visual_indexes"])
    mergers = (1 + more) * (linear(4 * d, 4 * d) + linear(4 * d, raw["out_hidden_size"])) + 2 * d + more * 2 * 4 * d
    return linear(2 * 3 * 16**2, d) + 48**2 * d + raw["depth"] * block(d, f) + mergers


def glm_tower(raw, *, ocr: bool) -> int:
    """Patches of two frames with a bias, RMSNorm blocks with gated MLPs, a convolution and a gated MLP behind it.

    GLM-4.1V has a norm and a table of positions before the blocks, and no biases in them; GLM-OCR has biases, and norms
    of queries and keys.
    """
    d, out, f = raw["hidden_size"], raw["out_hidden_size"], raw["intermediate_size"]
    inner, merged = (f, 3 * out) if ocr else (out, f)
    per_block = 4 * d * d + 3 * d * inner + 2 * d
    per_block += (4 * d + 2 * inner + d + 2 * d // raw["num_heads"]) if ocr else 0
    before = 0 if ocr else d + (raw["image_size"] // raw["patch_size"]) ** 2 * d
    after = d + linear(4 * d, out) + out * out + 2 * out + 3 * out * merged
    return linear(2 * 3 * 14**2, d) + before + raw["depth"] * per_block + after


def qwen_vl(raw) -> int:
    """Decoder with biases of queries, keys and values; OpenCLIP's bigG; a resampler to 256 tokens."""
    d, f, c = raw["hidden_size"], raw["intermediate_size"] // 2, raw["visual"]
    w, h = c["width"], int(c["width"] * c["mlp_ratio"])
    decoder = raw["num_hidden_layers"] * (3 * linear(d, d) + d * d + 3 * d * f + 2 * d) + d + 2 * raw["vocab_size"] * d
    tower = 3 * 14**2 * w + 256 * w + 2 * w + c["layers"] * (4 * linear(w, w) + linear(w, h) + linear(h, w) + 4 * w)
    resampler = 2 * 256 * d + w * d + 4 * d + 4 * linear(d, d)
    return decoder + tower + resampler + 2 * d + d * d


def two_layers(width: int, d: int) -> int:
    return linear(width, d) + linear(d, d)


def kind(raw) -> str:
    return "llava_video" if raw.get("architectures") == ["LlavaQwenForCausalLM"] else raw["model_type"]


def whole(raw) -> int:
    vision = raw.get("vision_config", SIGLIP)
    width = vision["hidden_size"]
    match kind(raw):
        case "mobilevlm":
            d = raw["hidden_size"]
            return text(raw) + clip(CLIP) + two_layers(1024, d) + 10 * d
        case "eve":
            d = raw["hidden_size"]
            readers = 2 * (4 * 1024 + 3 * 1024**2 + linear(1024, 1024))
            return text(raw) + 3 * 14**2 * 1024 + 2 * 1024 + readers + two_layers(1024, d)
        case "qwen":
            return qwen_vl(raw)
        case "llava" | "llava_next" | "llava_next_video" as family:
            sizes = LLAMA_7B | raw["text_config"]
            d = sizes["hidden_size"]
            return text(sizes) + clip(vision) + two_layers(width, d) + d * (family != "llava")
        case "llava_onevision" | "llava_video":
            sizes = raw.get("text_config", raw)
            d = sizes["hidden_size"]
            return text(sizes, bias=True) + siglip(vision) + two_layers(width, d) + d
        case "qwen2_vl":
            return text(raw, bias=True) + qwen2_tower(vision)
        case "qwen2_5_vl":
            return text(raw, bias=True) + qwen2_5_tower(vision)
        case "qwen3_vl" | "qwen3_vl_moe":
            return text(raw["text_config"]) + qwen3_tower(vision)
        case "qwen3_5" | "qwen3_5_moe":
            return delta_text(raw["text_config"], tied=raw["tie_word_embeddings"]) + qwen3_tower(vision)
        case "glm4v" | "glm_ocr" as family:
            ocr = family == "glm_ocr"
            sizes = raw["text_config"] | {"tie_word_embeddings": False}
            return text(sizes, bias=not ocr) + glm_tower(vision, ocr=ocr)
        case "internvl" | "internvl_chat":
            sizes = raw.get("text_config") or raw["llm_config"]
            projector = 2 * 4 * width + two_layers(4 * width, sizes["hidden_size"])
            bias = sizes["model_type"] == "qwen2"
            return text(sizes, bias=bias) + internvit(vision, six=width == 3200) + projector
        case "paddleocr_vl":
            sizes = raw["text_config"]
            projector = 2 * width + linear(4 * width, 4 * width) + linear(4 * width, sizes["hidden_size"])
            return text(sizes) + siglip(vision) + projector
        case "idefics3" | "smolvlm":
            sizes = raw["text_config"] | {"tie_word_embeddings": False}
            return text(sizes) + siglip(vision) + raw["scale_factor"] ** 2 * width * sizes["hidden_size"]
        case "gemma3":
            sizes = raw["text_config"] | {"tie_word_embeddings": True}
            return text(sizes) + siglip(vision) + width + width * sizes["hidden_size"]
        case "gemma4":
            return gemma4_text(raw["text_config"]) + gemma4_tower(vision) + width * raw["text_config"]["hidden_size"]
        case family:
            return text(raw, bias=family == "qwen2")


def gemma4_text(raw) -> int:
    """Heads by kind of layer; the last layers without keys and values; experts and vectors of each layer."""
    d, layers, vectors = raw["hidden_size"], raw["num_hidden_layers"], raw["hidden_size_per_layer_input"]
    total = raw["vocab_size"] * d + d
    for i, kind in enumerate(raw["layer_types"]):
        full, shared = kind == "full_attention", i >= layers - raw.get("num_kv_shared_layers", 0)
        head_dim = 512 if full else 256
        one = raw.get("attention_k_eq_v", False) and full
        keys = raw["num_global_key_value_heads"] if one else raw["num_key_value_heads"]
        total += 2 * raw["num_attention_heads"] * head_dim * d + head_dim  # with a norm of queries
        total += 0 if shared else keys * head_dim * d * (1 if one else 2) + head_dim
        total += 3 * d * raw["intermediate_size"] * (2 if shared and raw.get("use_double_wide_mlp") else 1)
        total += 4 * d + 1  # norms, and the factor of the layer
        if vectors:
            total += 2 * d * vectors + d
        if raw.get("enable_moe_block"):  # a router with two scales, and three norms
            total += raw["num_experts"] * (d + 1 + 3 * d * raw["moe_intermediate_size"]) + 4 * d
    return total + (raw["vocab_size"] + d) * layers * vectors + vectors


def gemma4_tower(raw) -> int:
    """No biases; four norms and two of heads a block; four bounds of each product if they are clipped."""
    d, head_dim = raw["hidden_size"], raw["hidden_size"] // raw["num_attention_heads"]
    per_block = 4 * d**2 + 3 * d * raw["intermediate_size"] + 4 * d + 2 * head_dim
    per_block += 7 * 4 * raw.get("use_clipped_linears", False)
    around = 3 * 16**2 * d + 2 * 10240 * d + 2 * d * raw.get("standardize", False)
    return around + raw["num_hidden_layers"] * per_block


def unused(raw) -> int:
    """What is published and never runs: a norm behind the tower; with feature layer -2 the last block too."""
    if kind(raw) in ("llava", "llava_next", "llava_next_video", "mobilevlm"):
        return clip_block(CLIP) + 2 * CLIP["hidden_size"]
    return 2 * SIGLIP["hidden_size"] if kind(raw) in ("llava_onevision", "llava_video") else 0


@pytest.mark.default("internvl2-1b")
@pytest.mark.parametrize("name", vlkv.presets)
def test_parameters_are_as_many_as_published(name):
    raw = vlkv.presets.raw[name]
    assert whole(raw) == PUBLISHED[name]
    shapes = jax.tree.leaves(abstract(vlkv.presets[name]))
    assert sum(x.size for x in shapes) == PUBLISHED[name] - unused(raw)


def test_glm_ocr_with_its_last_layer_is_as_large_as_published():
    """526 tensors of 1,325,258,240 parameters: one more layer, its projection, norms, embedding table and head."""
    sizes = vlkv.presets.raw["glm-ocr"]["text_config"] | {"tie_word_embeddings": False}
    d, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    layer = text(sizes | {"num_hidden_layers": 1}) - 2 * vocabulary * d - d
    assert PUBLISHED["glm-ocr"] + layer + 2 * d * d + 3 * d + 2 * vocabulary * d == 1_325_258_240


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


@pytest.mark.parametrize("name", [name for name in vlkv.presets if name.startswith("internvl")])
def test_tokens_of_internvl(name):
    """256 of each tile, marked by a token within the vocabulary, as is the one that ends an answer."""
    config = vlkv.presets[name]
    assert config.per_picture == 256
    assert all(0 <= token < config.decoder.vocab_size for token in (config.image_token, *config.stop))


def test_a_preset_that_is_not_there():
    with pytest.raises(vlkv.InputError, match=r"no preset 'llava-1\.5-70b': did you mean llava-1\.5-7b\?"):
        vlkv.presets["llava-1.5-70b"]
    assert "llava-1.5-7b" in vlkv.presets and "gpt" not in vlkv.presets
