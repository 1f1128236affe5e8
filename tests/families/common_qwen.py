"""Tiny Qwen2-VL, Qwen2.5-VL and Qwen3-VL models made by transformers, and batches for them."""

from __future__ import annotations

import numpy as np

from tests.families.common import Row
from tests.parity.conftest import VOCABULARY, perturb, torch, transformers

START, END, IMAGE, VIDEO = 95, 96, 97, 98
PATCH, MERGE, VALUES = 4, 2, 3 * 2 * 4 * 4
SECONDS = 0.7  # per frame: with two positions per second, frame 1 is at 1.4, which is truncated
KINDS = ("qwen2_vl", "qwen2_5_vl")


def make(kind: str, seed: int = 0, **changes):
    """A tower with three blocks; in Qwen2.5-VL two of them have windows of 2 x 2 tokens.

    In Qwen3-VL the decoder has four layers, and each block of the tower is added to one of the first three. Its second
    form has experts in all layers but the second. In Qwen3.5 three of five layers are recurrent.
    """
    tied = changes.pop("tied", False)
    text = dict(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    vision = dict(depth=3, num_heads=2, patch_size=PATCH, spatial_merge_size=MERGE, temporal_patch_size=2)
    if kind == "qwen2_vl":
        classes = transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration
        vision |= dict(embed_dim=32, hidden_size=48, mlp_ratio=2)
    elif kind in ("qwen3_vl", "qwen3_vl_moe"):
        classes = transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration
        if kind == "qwen3_vl_moe":
            classes = transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration
            text |= dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, mlp_only_layers=[1])
        vision |= dict(hidden_size=32, out_hidden_size=48, intermediate_size=40, num_position_embeddings=25,
                       deepstack_visual_indexes=[0, 1, 2])  # fmt: skip
        text |= dict(num_hidden_layers=4, head_dim=16)
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    elif kind in ("qwen3_5", "qwen3_5_moe"):
        classes = transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration
        text |= DELTA
        if kind == "qwen3_5_moe":
            classes = transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration
            del text["intermediate_size"]
            text |= EXPERTS
        vision |= dict(hidden_size=32, out_hidden_size=48, intermediate_size=40, num_position_embeddings=25)
    else:
        classes = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration
        vision |= dict(hidden_size=32, out_hidden_size=48, intermediate_size=40, window_size=16,
                       fullatt_block_indexes=[1], tokens_per_second=2)  # fmt: skip
    config = classes[0](
        text_config={**text, **changes}, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(seed)  # some parameters keep their first values
    model = classes[1](config).eval()
    perturb(model, seed)
    remember_longer(model)
    if "linear_num_key_heads" in text and not tied:  # five layers deep: 1e-4 shall not be a matter of rounding
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(0.6)
    return model


# A quarter of each head is rotated, and three value heads share a key head.
DELTA = dict(
    num_hidden_layers=5, head_dim=32, linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=12,
    linear_num_key_heads=2, linear_num_value_heads=6,
    layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear", "linear", "full")],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                     "mrope_section": [2, 1, 1], "mrope_interleaved": True},
)  # fmt: skip
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28)


def remember_longer(model) -> None:
    """Makes the memories of recurrent layers decay over hundreds of tokens, so that every chunk depends on all others.

    With the initial decay an output is mostly that of one token, and rounding matters where it is nearly zero, because
    a norm follows.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(4.0)


# Each row: numbers of text tokens, and between them images as (kind, frames, lines and columns of patches).
ROWS = (
    (4, ("image", 1, 4, 6), 3, ("image", 1, 6, 2), 5),
    (2, ("image", 1, 6, 10), 1, ("video", 2, 4, 4), 6),
    (3, ("image", 1, 4, 8), 9),
    (12,),
)


def make_row(pieces, rng: np.random.Generator, *, apart: bool = False, seconds: bool = False) -> Row:
    """One prompt as transformers' processor returns it.

    Args:
        pieces: as in `ROWS`.
        rng: for tokens and pixels.
        apart: each frame of a video after a time of two tokens.
        seconds: with the seconds of a frame, which only Qwen2.5-VL uses.
    """
    ids: list[int] = []
    extra: dict[str, list] = {}
    for piece in pieces:
        if isinstance(piece, int):
            ids += rng.integers(3, 90, piece).tolist()
            continue
        kind, *grid = piece
        is_video, runs, count = kind == "video", piece[1] if apart else 1, int(np.prod(grid))
        for _ in range(runs):
            ids += rng.integers(3, 90, 2 * (apart and is_video)).tolist()
            ids += [START, *[VIDEO if is_video else IMAGE] * (count // MERGE**2 // runs), END]
        pixels = rng.normal(size=(count, VALUES)).astype(np.float32)
        extra.setdefault("pixel_values_videos" if is_video else "pixel_values", []).extend(pixels)
        extra.setdefault(f"{kind}_grid_thw", []).append(grid)
        if is_video and seconds:
            extra.setdefault("second_per_grid_ts", []).append(SECONDS)
    return Row(ids, {**extra, "mm_token_type_ids": [[(token == IMAGE) + 2 * (token == VIDEO) for token in ids]]})


def make_rows(rows=ROWS, seed: int = 0, **options) -> list[Row]:
    """Prompts of these rows; `options` are those of `make_row`."""
    rng = np.random.default_rng(seed)
    return [make_row(row, rng, **options) for row in rows]
