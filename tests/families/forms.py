"""Parts of the tiny models that families share: sizes, forms of pictures, and the entry of a family in the tests.

Without torch, so that tests without transformers can use them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vlkv.config import ModelConfig
from vlkv.families.llava_next.inputs import Views

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
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[1])
CROPPED = dict(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
WHOLE = dict(size={"height": 6 * PATCH, "width": 6 * PATCH})
EDGE = dict(size={"longest_edge": 18 * PATCH}, max_image_size={"longest_edge": 6 * PATCH})


def tiny_text(kind: str = "llama") -> dict[str, Any]:
    return {"model_type": kind, **DECODER}


def pixel_limits(most: int) -> dict[str, Any]:
    return dict(patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * most})


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image: its number of image tokens, and the arrays that the processor returns for it."""

    tokens: int
    extra: dict[str, list[Any]]


def square(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """LLaVA-1.5, MobileVLM, Qwen-VL and Gemma 3: one square per image."""
    del number, alone
    return Picture(c.side**2, {"pixel_values": [rng.normal(size=(3, c.vision.image_size, c.vision.image_size))]})


def tiled(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """LLaVA-NeXT and its successors: images of different sizes, tiles padded to the same number."""
    size = ((20, 38), (45, 20), (60, 55))[number]
    pixels = rng.normal(size=(MOST_TILES, 3, SIDE, SIDE))
    return Picture(len(Views(c).picture(size, alone=alone)), {"pixel_values": [pixels], "image_sizes": [size]})


def intern(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """InternVL: images of one, three and two tiles."""
    del alone
    tiles = (1, 3, 2)[number]
    pixels = rng.normal(size=(tiles, 3, c.vision.image_size, c.vision.image_size))
    return Picture(tiles * c.per_picture, {"pixel_values": list(pixels)})


def marked(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """SmolVLM: images of one, three and two tiles, in rows that are padded to the same number."""
    del alone
    tiles, size = (1, 3, 2)[number], c.vision.image_size
    pixels = rng.normal(size=(3, 3, size, size)) * (np.arange(3) < tiles)[:, None, None, None]
    return Picture(tiles * c.per_picture, {"pixel_values": [pixels]})


def native(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """Native resolution: patches of all images in one list, and lines and columns of each image."""
    del alone
    lines, columns = ((4, 6), (8, 4), (6, 10))[number]
    patches = rng.normal(size=(lines * columns, *c.vision.patch_shape))
    tokens = lines * columns // c.vision.merge**2
    return Picture(tokens, {"pixel_values": list(patches), "image_grid_thw": [(1, lines, columns)]})


def patches(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """Gemma 4: patches and their columns and lines, padded to the same number."""
    del alone
    lines, columns = ((4, 6), (8, 4), (6, 10))[number]
    at = np.indices((lines, columns)).reshape(2, -1)[::-1].T
    more = 64 - len(at)
    pixels = np.pad(rng.random((len(at), *c.vision.patch_shape)), [(0, more), (0, 0)])
    place = np.pad(at, [(0, more), (0, 0)], constant_values=-1)
    return Picture(len(at) // c.vision.merge**2, {"pixel_values": [pixels], "image_position_ids": [place]})


def windows(c: ModelConfig, rng: np.random.Generator, number: int, alone: bool) -> Picture:
    """EVE: an image on part of a square, whose fourth channel is a mask of the image."""
    del alone
    lines, columns = ((2, 3), (4, 1), (3, 4))[number]
    size = c.vision.window_size
    pixels = rng.normal(size=(4, 4 * size, 4 * size))
    pixels[3] = 0
    pixels[3, : lines * size, : columns * size] = 1
    return Picture(1 + lines * (columns + 1), {"pixel_values": [pixels]})


# Prompts of "what?" with an image, after the answer "yes" and "why?".
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. USER: [I]\nwhat? ASSISTANT: yes</s>USER: why? ASSISTANT:"
)
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
CHATML = (
    "<|im_start|>user\n{image}what?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
)
# Today's names -> those that the first checkpoints have.
TRANSFORMERS_4 = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(vision_tower|multi_modal_projector|image_newline)", r"\1"),
)
LLAVA_4 = (*TRANSFORMERS_4, (r"^vision_tower\.", "vision_tower.vision_model."))
QWEN_4 = ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
LLAVA_ORIGINAL = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.vision_tower\.", "model.vision_tower.vision_tower.vision_model."),
    (r"^model\.multi_modal_projector\.linear_1\.", "model.mm_projector.0."),
    (r"^model\.multi_modal_projector\.linear_2\.", "model.mm_projector.2."),
)
MOBILEVLM = (
    *LLAVA_ORIGINAL,
    (r"^model\.mm_projector\.(\d)\.", r"model.mm_projector.mlp.mlp.\1."),
    (r"^model\.multi_modal_projector\.depthwise\.", "model.mm_projector.peg.peg.0."),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiny:
    """A `model_type` in the tests that need no torch."""

    raw: dict[str, Any]  # what is necessary of a tiny `config.json`
    picture: Callable[..., Picture]  # the form of its pictures
    # Its image processors in transformers: module, class, settings.
    processors: Sequence[tuple[str, str, dict[str, Any]]] = ()
    # Settings of the first one that are refused, and what is said.
    refused: Sequence[tuple[dict[str, Any], str]] = ()
    renames: Sequence[tuple[str, str]] = ()  # from names of its tensors to those of the first checkpoints
    # Its prompt in a folder without a template: "what?" with an image, "yes", "why?"; None: refused.
    prompt: str | None = None
