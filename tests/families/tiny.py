"""A tiny model and a batch of unequal rows for every family with a tower, made without torch.

A config is read from the necessary part of a `config.json`, and images have the form that the family's processor in
transformers returns. `FAMILIES` comes from the registry, so a family that is missing here fails.
"""

import dataclasses
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

import vlkv
from tests.models import padded, random_model
from tests.programs import generate
from vlkv import families, policies
from vlkv.config import ModelConfig
from vlkv.families import config_from_hf
from vlkv.families.llava_next.inputs import Views

FAMILIES = tuple(kind for kind in families.FAMILIES if kind not in families.text.FAMILIES)
NEW = 4  # tokens of every answer
START, END, IMAGE, VIDEO = 95, 96, 97, 98
VOCABULARY, SIDE, PATCH = 120, 21, 7  # 9 patches per image
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [3 * SIDE, 3 * SIDE]]
MOST_TILES = 10

DECODER = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE,
             patch_size=PATCH)  # fmt: skip
SIGLIP = dict(model_type="siglip_vision_model", **TOWER)
INTERN = TOWER | dict(image_size=6 * PATCH)  # 9 tokens per tile
QWEN = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
MROPE = DECODER | dict(rope_scaling=dict(type="mrope", mrope_section=[2, 1, 1]), image_token_id=IMAGE,
                       video_token_id=VIDEO)  # fmt: skip
GLM = DECODER | dict(rope_parameters=dict(partial_rotary_factor=0.5, mrope_section=[1, 1, 0]))
GLM_TOWER = QWEN | dict(hidden_size=16, out_hidden_size=32, intermediate_size=24, image_size=12)
GLM_TOKENS = dict(image_token_id=IMAGE, video_start_token_id=VIDEO, video_end_token_id=VIDEO + 1)
ORIGINAL = DECODER | dict(
    mm_vision_tower="somewhere/tiny", mm_hidden_size=16, mm_projector_type="mlp2x_gelu", vision_config=TOWER,
    image_aspect_ratio="pad",
)  # fmt: skip


def _text(kind: str = "llama") -> dict[str, Any]:
    return {"model_type": kind, **DECODER}


RAW: dict[str, dict[str, Any]] = {
    "llava": dict(text_config=_text(), vision_config=TOWER, image_token_index=IMAGE),
    "llava_llama": ORIGINAL,
    "mobilevlm": ORIGINAL | dict(mm_projector_type="ldpnetv2", vision_config=TOWER | dict(image_size=24, patch_size=2)),
    "llava_next": dict(text_config=_text("mistral") | dict(sliding_window=None), vision_config=TOWER,
                       image_token_index=IMAGE, image_grid_pinpoints=PINPOINTS),
    "llava_next_video": dict(text_config=_text(), vision_config=TOWER, image_token_index=IMAGE,
                             video_token_index=VIDEO, image_grid_pinpoints=PINPOINTS),
    "llava_onevision": dict(text_config=_text("qwen2"), vision_config=SIGLIP, image_token_index=IMAGE,
                            video_token_index=VIDEO, image_grid_pinpoints=PINPOINTS,
                            vision_aspect_ratio="anyres_max_2"),
    "llava_qwen": _text("qwen2") | dict(vision_config=SIGLIP, image_token_index=IMAGE, image_grid_pinpoints=PINPOINTS,
                                        image_aspect_ratio="anyres_max_2", mm_newline_position="grid"),
    "internvl": dict(text_config=_text("qwen2"), vision_config=INTERN, image_token_id=IMAGE, tie_word_embeddings=False),
    "internvl_chat": dict(llm_config=_text("internlm2") | dict(bias=False), vision_config=INTERN, ps_version="v2",
                          template="internlm2-chat", added_tokens={"<IMG_CONTEXT>": IMAGE, "<|im_end|>": 2}),
    **{kind: dict(text_config=_text(), vision_config=INTERN, image_token_id=IMAGE) for kind in ("idefics3", "smolvlm")},
    "qwen2_vl": MROPE | dict(vision_config=QWEN | dict(embed_dim=16, hidden_size=32, mlp_ratio=2)),
    "qwen2_5_vl": MROPE | dict(vision_config=QWEN | dict(hidden_size=16, out_hidden_size=32, intermediate_size=24,
                                                         window_size=16, fullatt_block_indexes=[1])),
    "qwen3_vl": dict(
        text_config=_text("qwen3_vl_text") | dict(head_dim=8, rope_scaling=dict(mrope_section=[2, 1, 1])),
        vision_config=QWEN | dict(hidden_size=16, out_hidden_size=32, intermediate_size=24, num_position_embeddings=9,
                                  deepstack_visual_indexes=[0, 1]),
        image_token_id=IMAGE, video_token_id=VIDEO, tie_word_embeddings=False),
    **{kind: dict(text_config=GLM, vision_config=GLM_TOWER, **GLM_TOKENS) for kind in ("glm4v", "glm46v", "glm_ocr")},
    "paddleocr_vl": dict(
        text_config=_text("paddleocr_vl_text") | dict(head_dim=8, rope_scaling=dict(mrope_section=[2, 1, 1])),
        vision_config=TOWER | dict(image_size=12, patch_size=4), image_token_id=IMAGE, tie_word_embeddings=False),
    "qwen": DECODER | dict(hidden_size=128, num_attention_heads=2, kv_channels=64, seq_length=512, no_bias=True,
                           visual=dict(heads=2, image_size=16, image_start_id=START, layers=2, mlp_ratio=1.5,
                                       output_dim=128, patch_size=4, width=16, n_queries=16)),
    "gemma3": dict(
        text_config=_text("gemma3_text") | dict(head_dim=8, query_pre_attn_scalar=12, sliding_window=8,
                                                num_hidden_layers=4, sliding_window_pattern=2),
        vision_config=SIGLIP | dict(image_size=6 * PATCH), image_token_index=IMAGE, mm_tokens_per_image=9,
        tie_word_embeddings=True),
    "gemma4": dict(
        text_config=_text("gemma4_text") | dict(
            head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=8,
            num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=2,
            hidden_size_per_layer_input=6, vocab_size_per_layer_input=VOCABULARY, final_logit_softcapping=20.0,
            use_bidirectional_attention="vision"),
        vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                           num_key_value_heads=2, head_dim=8, patch_size=4, pooling_kernel_size=2,
                           position_embedding_size=16, standardize=True),
        image_token_id=IMAGE, audio_token_id=99, video_token_id=100, vision_soft_tokens_per_image=16,
        tie_word_embeddings=True),
    "eve": DECODER | dict(mm_vision_tower="eve-patch14-anypixel-672", mm_projector_type="mlp2x_gelu",
                          mm_hidden_size=32),
}  # fmt: skip
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[1])
_DELTA = dict(
    num_hidden_layers=5, head_dim=16, linear_key_head_dim=6, linear_value_head_dim=5, linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear", "linear", "full")],
    rope_parameters=dict(partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
)  # fmt: skip
RAW["qwen3_5"] = dict(
    text_config=_text("qwen3_5_text") | _DELTA, image_token_id=IMAGE, video_token_id=VIDEO, tie_word_embeddings=False,
    vision_config=RAW["qwen3_vl"]["vision_config"] | dict(deepstack_visual_indexes=[]),
)  # fmt: skip
RAW["qwen3_5_moe"] = RAW["qwen3_5"] | dict(
    text_config=_text("qwen3_5_moe_text")
    | _DELTA
    | EXPERTS
    | dict(mlp_only_layers=[], shared_expert_intermediate_size=10)
)
RAW["qwen3_vl_moe"] = RAW["qwen3_vl"] | dict(
    text_config=RAW["qwen3_vl"]["text_config"] | EXPERTS | dict(model_type="qwen3_vl_moe_text"))  # fmt: skip


# The image processors of families that transformers has: module, class, settings.
_SQUARE = dict(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
_WHOLE = dict(size={"height": 6 * PATCH, "width": 6 * PATCH})
_EDGE = dict(size={"longest_edge": 18 * PATCH}, max_image_size={"longest_edge": 6 * PATCH})


def _pixels(most: int) -> dict[str, Any]:
    return dict(patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * most})


PROCESSORS: dict[str, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    "llava": (("clip", "CLIP", _SQUARE), ("llava", "Llava", _SQUARE | dict(do_pad=True)),
              ("siglip", "Siglip", dict(size={"height": SIDE, "width": SIDE}))),
    "llava_next": (("llava_next", "LlavaNext", _SQUARE | dict(image_grid_pinpoints=PINPOINTS)),),
    "llava_onevision": (("llava_onevision", "LlavaOnevision",
                         dict(image_grid_pinpoints=PINPOINTS, size={"height": SIDE, "width": SIDE})),),
    "internvl": (("got_ocr2", "GotOcr2", _WHOLE | dict(max_patches=5)),),
    "idefics3": (("idefics3", "Idefics3", _EDGE),), "smolvlm": (("smolvlm", "SmolVLM", _EDGE),),
    "qwen2_vl": (("qwen2_vl", "Qwen2VL", _pixels(40)),), "glm4v": (("glm4v", "Glm4v", _pixels(80)),),
    "glm46v": (("glm46v", "Glm46V", _pixels(80)),),
    "paddleocr_vl": (  # the second as published since version 1.5
        ("paddleocr_vl", "PaddleOCRVL", _pixels(40) | dict(temporal_patch_size=1)),
        ("paddleocr_vl", "PaddleOCRVL",
         dict(patch_size=4, merge_size=2, min_pixels=256, max_pixels=2560, temporal_patch_size=1))),
    "gemma3": (("gemma3", "Gemma3", _WHOLE | dict(
        do_pan_and_scan=True, pan_and_scan_min_crop_size=20, pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2)), ("gemma3", "Gemma3", _WHOLE)),
    "gemma4": (("gemma4", "Gemma4", dict(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)),),
}  # fmt: skip


# Halves compile time in a process without conftest's flags; only jaxlib 0.10 has this option.
QUICK = {"xla_cpu_use_fusion_emitters": False} if version("jaxlib").startswith("0.10.") else {}


def read_config(family: str) -> ModelConfig:
    """The tiny config of a family."""
    raw = dict(RAW[family])
    return config_from_hf({**raw, "model_type": family}, added=raw.pop("added_tokens", None))


def make_model(family: str, seed: int = 0):
    """A tiny model of a family, as `random_model` makes it."""
    return random_model(read_config(family), seed)


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image: its number of image tokens, and the arrays that the processor returns for it."""

    tokens: int
    extra: dict[str, list[Any]]


def _square(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """LLaVA-1.5, MobileVLM, Qwen-VL and Gemma 3: one square per image."""
    del number, alone
    return Picture(c.side**2, {"pixel_values": [rng.normal(size=(3, c.vision.image_size, c.vision.image_size))]})


def _tiled(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """LLaVA-NeXT and its successors: images of different sizes, tiles padded to the same number."""
    size = ((20, 38), (45, 20), (60, 55))[number]
    pixels = rng.normal(size=(MOST_TILES, 3, SIDE, SIDE))
    return Picture(len(Views(c).picture(size, alone=alone)), {"pixel_values": [pixels], "image_sizes": [size]})


def _intern(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """InternVL: images of one, three and two tiles."""
    del alone
    tiles = (1, 3, 2)[number]
    pixels = rng.normal(size=(tiles, 3, c.vision.image_size, c.vision.image_size))
    return Picture(tiles * c.per_picture, {"pixel_values": list(pixels)})


def _marked(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """SmolVLM: images of one, three and two tiles, in rows that are padded to the same number."""
    del alone
    tiles, size = (1, 3, 2)[number], c.vision.image_size
    pixels = rng.normal(size=(3, 3, size, size)) * (np.arange(3) < tiles)[:, None, None, None]
    return Picture(tiles * c.per_picture, {"pixel_values": [pixels]})


def _native(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """Qwen2-VL and PaddleOCR-VL: patches of all images in one list, and lines and columns of each image."""
    del alone
    lines, columns = ((4, 6), (8, 4), (6, 10))[number]
    patches = rng.normal(size=(lines * columns, *c.vision.patch_shape))
    tokens = lines * columns // c.vision.merge**2
    return Picture(tokens, {"pixel_values": list(patches), "image_grid_thw": [(1, lines, columns)]})


def _patches(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """Gemma 4: patches and their columns and lines, padded to the same number."""
    del alone
    lines, columns = ((4, 6), (8, 4), (6, 10))[number]
    at = np.indices((lines, columns)).reshape(2, -1)[::-1].T
    more = 64 - len(at)
    pixels = np.pad(rng.random((len(at), *c.vision.patch_shape)), [(0, more), (0, 0)])
    place = np.pad(at, [(0, more), (0, 0)], constant_values=-1)
    return Picture(len(at) // c.vision.merge**2, {"pixel_values": [pixels], "image_position_ids": [place]})


def _windows(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """EVE: an image on part of a square, whose fourth channel is a mask of the image."""
    del alone
    lines, columns = ((2, 3), (4, 1), (3, 4))[number]
    size = c.vision.window_size
    pixels = rng.normal(size=(4, 4 * size, 4 * size))
    pixels[3] = 0
    pixels[3, : lines * size, : columns * size] = 1
    return Picture(1 + lines * (columns + 1), {"pixel_values": [pixels]})


PICTURES: dict[str, Callable[..., Picture]] = {
    **dict.fromkeys(("llava", "llava_llama", "mobilevlm", "qwen", "gemma3"), _square),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "llava_qwen"), _tiled),
    **dict.fromkeys(("internvl", "internvl_chat"), _intern),
    **dict.fromkeys(("idefics3", "smolvlm"), _marked),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "paddleocr_vl"), _native),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _native),
    **dict.fromkeys(("glm4v", "glm46v", "glm_ocr"), _native),
    "gemma4": _patches,
    "eve": _windows,
}


def make_batch(family: str, seed: int = 0, *, reverse: bool = False) -> vlkv.Inputs:
    """Rows with two images, one, and none; the second is padded on the left, the others on the right.

    `reverse`: the same rows in the reverse order.
    """
    c, rng = read_config(family), np.random.default_rng(seed)
    rows: list[tuple[list[int], dict[str, list[Any]]]] = []
    for numbers, words in (((0, 1), 12), ((2,), 9), ((), 14)):
        ids, at, extra = rng.integers(3, 90, words).tolist(), 3, {}
        for number in numbers:
            picture = PICTURES[family](c, rng, number, len(numbers) == 1)
            ids[at:at] = [START, *[c.image_token] * picture.tokens, END]
            at += picture.tokens + 3  # one word between two images
            for name, values in picture.extra.items():
                extra.setdefault(name, []).extend(values)
        if numbers:
            extra["batch_num_images"] = [len(numbers)]
        rows.append((ids, extra))
    rows = rows[::-1] if reverse else rows
    joined: dict[str, list[Any]] = {}
    for _, extra in rows:
        for name, values in extra.items():
            joined.setdefault(name, []).extend(values)
    return vlkv.Inputs.from_hf({**padded([ids for ids, _ in rows], ("right", "left", "right")), **joined}, c)


# Methods whose defaults need more than two layers or more than one stage of merging, or keep every token.
OPTIONS: dict[str, dict[str, Any]] = {
    "avl": {"core": 0.2},
    "dart": {"layer": 1, "vision_pivots": 2, "text_pivots": 1},
    "fastv": {"layer": 1},
    "ivtp": {"layers": (1,)},
    "lightkv": {"keep": 0.5, "layers": (1,), "windows": (2,)},
    "rdkv": {"keep": 0.1},  # a few bits for every token take a quarter of the bytes
    **{name: {"keep": 0.5, "layers": (1,)} for name in ("tome", "pitome", "tofu", "pyramiddrop", "sparsevlm")},
}


def make_policy(name: str, **options) -> policies.Policy:
    """A registered policy with options for two layers."""
    full = issubclass(policies.named(name), policies.Full)
    return policies.make(name, **({} if full else {"keep": 0.3}) | OPTIONS.get(name, {}) | options)


def answer(params, batch: vlkv.Inputs, policy: policies.Policy) -> vlkv.Output:
    """Generates `NEW` tokens for every row."""
    sampling = vlkv.Greedy(max_new_tokens=NEW, stop=())
    return generate(params, batch, policy=policy, sampling=sampling, key=jax.random.key(0))


def check_output(batch: vlkv.Inputs, output: vlkv.Output, policy: policies.Policy) -> None:
    """Asserts that every row is answered, no padding is kept, and fewer tokens are kept than the prompts have."""
    length, prompt = output.kept.sum(axis=-1), batch.valid.sum(axis=1)
    layers, _, heads = length.shape
    assert (np.asarray(output.lengths) == NEW).all()
    assert (length > 0).all()
    assert (length <= prompt[:, None]).all()
    assert not (output.kept & ~batch.valid[:, None]).any(), "padding never gets a slot"
    if not isinstance(policy, policies.Full):
        assert length[:, :2].sum() < layers * prompt[:2].sum() * heads
