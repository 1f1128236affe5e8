"""Tiny Qwen2-VL, Qwen2.5-VL and Qwen3-VL models made by transformers, and batches for them."""

from __future__ import annotations

import numpy as np

from tests.models import padded
from tests.parity.conftest import VOCABULARY, perturb, torch, transformers
from vlkv.buckets import Buckets

START, END, IMAGE, VIDEO = 95, 96, 97, 98
BUCKETS = Buckets(patches=(64, 96, 128))
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


def prompts(padding: str = "right", rows=ROWS, seed: int = 0, *, apart: bool = False) -> dict[str, np.ndarray]:
    """A batch in the form that transformers' processor returns; `apart`: each frame of a video after a time."""
    rng = np.random.default_rng(seed)
    ids, grids = [], {"image": [], "video": []}
    for row in rows:
        made: list[int] = []
        for piece in row:
            if isinstance(piece, int):
                made += rng.integers(3, 90, piece).tolist()
            else:
                kind, *grid = piece
                grids[kind].append(grid)
                runs = grid[0] if apart else 1
                count = int(np.prod(grid)) // MERGE**2 // runs
                for _ in range(runs):
                    made += rng.integers(3, 90, 2 * (apart and kind == "video")).tolist()
                    made += [START, *[IMAGE if kind == "image" else VIDEO] * count, END]
        ids.append(made)
    batch = padded(ids, padding)
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[kind]:
            grid = np.array(grids[kind])
            batch[name] = rng.normal(size=(int(grid.prod(axis=1).sum()), VALUES)).astype(np.float32)
            batch[f"{kind}_grid_thw"] = grid
    if grids["video"]:
        batch["second_per_grid_ts"] = np.full(len(grids["video"]), SECONDS)
    return batch


def one_row(batch, row: int, rows=ROWS) -> dict:
    """The arguments of transformers' forward for one row without its padding."""
    ids = batch["input_ids"][row][batch["attention_mask"][row].astype(bool)][None]
    kinds = (ids == IMAGE) + 2 * (ids == VIDEO)
    made = {"input_ids": torch.tensor(ids), "mm_token_type_ids": torch.tensor(kinds.astype(np.int64))}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        before, own = (sum(sum(not isinstance(p, int) and p[0] == kind for p in r) for r in part)
                       for part in (rows[:row], rows[row : row + 1]))  # fmt: skip
        if own:
            grids = batch[f"{kind}_grid_thw"]
            ends = np.concatenate([[0], np.cumsum(grids.prod(axis=1))])
            made[f"{kind}_grid_thw"] = torch.tensor(grids[before : before + own])
            made[name] = torch.tensor(batch[name][ends[before] : ends[before + own]])
            if kind == "video" and "second_per_grid_ts" in batch:
                made["second_per_grid_ts"] = batch["second_per_grid_ts"][before : before + own].tolist()
    return made


def for_model(kind: str, row: dict) -> dict:
    """The row without seconds for Qwen2-VL, whose forward has no such argument."""
    return {key: value for key, value in row.items() if kind == "qwen2_5_vl" or key != "second_per_grid_ts"}
