"""Tiny random InternVLs made by transformers, one padded batch for all tests, and comparisons with transformers."""

from __future__ import annotations

import numpy as np

from tests.families.common import NEW, Row, answer, check_answers, check_states
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


SIDES = ("left", "right", "left")  # where the rows are padded


def make_rows(seed=0) -> list[Row]:
    """An image of three tiles and one of one tile; an image of one tile; none."""
    rng, rows = np.random.default_rng(seed), []
    for pictures, words in (((3, 1), 12), ((1,), 13), ((), 9)):
        ids = rng.integers(3, 90, words).tolist()
        for tiles in pictures:
            ids[4:4] = [START, *[IMAGE] * (TOKENS * tiles), END, 7]
        pixels = rng.normal(size=(sum(pictures), 3, SIDE, SIDE)).astype(np.float32)
        rows.append(Row(ids, {"pixel_values": list(pixels)} if pictures else {}))
    return rows


def check_forward(model, params, rows) -> None:
    """Asserts that logits and layer outputs of every row are within 1e-4 of transformers'."""
    check_states(params, rows, [answer(model, row) for row in rows], SIDES)


def check_generate(model, params, rows, count: int = NEW) -> None:
    """Asserts that the greedy tokens of every row equal transformers'."""
    check_answers(params, rows, [answer(model, row, count) for row in rows], SIDES)
