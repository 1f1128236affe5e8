"""Tiny random InternVLs made by transformers, one padded batch for all tests, and comparisons with transformers."""

from __future__ import annotations

import numpy as np

import vlkv
from tests.families.common import NEW, Row, answer, check_answers, check_batch
from tests.models import padded
from tests.parity.conftest import perturb, transformers

IMAGE, START, END = 99, 98, 97
SIDE, TOKENS = 56, 16  # pixels of a tile, vision tokens of a tile
STOP = 96

_TEXT = {
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "phi3": transformers.Phi3Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}
_SIZES = {"qwen3": dict(head_dim=16)}  # heads together wider than the decoder, as in Qwen3-0.6B
_SIZES["qwen3_moe"] = dict(head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
                           mlp_only_layers=[], norm_topk_prob=True)  # fmt: skip
SMALL_VIT = dict(norm_type="layer_norm", attention_bias=True, use_qk_norm=False)  # as InternViT-300M
LARGE_VIT = dict(norm_type="rms_norm", attention_bias=False, use_qk_norm=True)  # as InternViT-6B


def make_internvl(kind, vision, *, seed=0, tied=False, layer=-1, **changes):
    """A three-layer tower with 64 patches per tile, and a two-layer decoder with grouped heads."""
    vision = transformers.InternVLVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, image_size=SIDE,
        patch_size=7, **vision,
    )  # fmt: skip
    text = _TEXT[kind](
        vocab_size=120, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=tied, **_SIZES.get(kind, {}), **changes,
    )  # fmt: skip
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=TOKENS,
        vision_feature_layer=layer, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.InternVLForConditionalGeneration(config).eval()
    perturb(model, seed)
    return model


def make_batch(seed=0, order=(0, 1, 2)):
    """Three rows: an image of three tiles and one of one tile, an image of one, none. Padded left, right and left."""
    rng = np.random.default_rng(seed)
    rows = []
    for pictures, words in (((3, 1), 12), ((1,), 13), ((), 9)):
        ids = list(rng.integers(3, 90, words))
        for tiles in pictures:
            ids[4:4] = [START, *[IMAGE] * (TOKENS * tiles), END, 7]
        rows.append(ids)
    pixels = np.split(rng.normal(size=(5, 3, SIDE, SIDE)).astype(np.float32), [4, 5])
    sides = ["right" if row == 1 else "left" for row in order]
    batch = padded([rows[row] for row in order], sides)
    return batch | {"pixel_values": np.concatenate([pixels[row] for row in order])}


def single_rows(batch) -> list[Row]:
    """The rows without padding, each with its own tiles."""
    rows, used = [], 0
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].astype(bool), strict=True):
        tiles = int((ids[mask] == IMAGE).sum()) // TOKENS
        rows.append(
            Row(ids[mask].tolist(), {"pixel_values": batch["pixel_values"][used : used + tiles]} if tiles else {})
        )
        used += tiles
    return rows


def check_forward(model, params, batch) -> None:
    """Asserts that logits and layer outputs of every row are within 1e-4 of transformers'."""
    check_batch(params, batch, [answer(model, row) for row in single_rows(batch)])


def check_generate(model, params, batch, count: int = NEW) -> None:
    """Asserts that the greedy tokens of every row equal transformers'."""
    answers = [answer(model, row, count) for row in single_rows(batch)]
    check_answers(params, vlkv.Inputs.from_hf(batch, params.config), answers)
