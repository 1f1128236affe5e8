"""Tiny Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 models made by transformers, their prompts and records."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.families import common, forms
from tests.families.common import Record, Row, fields, new_names, normal, random_pieces, raw_of, text, vision
from tests.families.forms import Tiny, native, pixel_limits, tiny_text
from tests.parity.conftest import make_text, torch

START, END, IMAGE, VIDEO = 95, 96, 97, 98
PATCH, MERGE, VALUES = 4, 2, 3 * 2 * 4 * 4
SECONDS = 0.7  # per frame: with two positions per second, frame 1 is at 1.4, which is truncated


# A quarter of each head is rotated, and three value heads share a key head.
DELTA = dict(
    num_hidden_layers=5, head_dim=32, linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=12,
    linear_num_key_heads=2, linear_num_value_heads=6,
    layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear", "linear", "full")],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                     "mrope_section": [2, 1, 1], "mrope_interleaved": True},
)  # fmt: skip
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28)
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
DEEP = dict(num_hidden_layers=4, head_dim=16,
            rope_parameters=SECTIONS | {"mrope_section": [4, 2, 2], "mrope_interleaved": True})  # fmt: skip
TOWER = dict(depth=3, num_heads=2, patch_size=PATCH, spatial_merge_size=MERGE, temporal_patch_size=2)
BLOCK = TOWER | dict(hidden_size=32, out_hidden_size=48, intermediate_size=40)
TABLE = BLOCK | dict(num_position_embeddings=25)
# Fields of decoder and tower. In Qwen2.5-VL two blocks have windows of 2 x 2 tokens. In Qwen3-VL each block of the
# tower is added to one of the first three layers; its second form has experts in all layers but the second.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({}, TOWER | dict(embed_dim=32, hidden_size=48, mlp_ratio=2)),
    "qwen2_5_vl": ({}, BLOCK | dict(window_size=16, fullatt_block_indexes=[1], tokens_per_second=2)),
    "qwen3_vl": (DEEP, TABLE | dict(deepstack_visual_indexes=[0, 1, 2])),
    "qwen3_vl_moe": (
        DEEP | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, mlp_only_layers=[1]),
        TABLE | dict(deepstack_visual_indexes=[0, 1, 2])),
    "qwen3_5": (DELTA, TABLE),
    "qwen3_5_moe": (DELTA | EXPERTS, TABLE),
}  # fmt: skip


def make(kind: str, seed: int = 0, *, tied: bool = False, **changes):
    """The tiny model of a kind; `changes`: of the decoder."""
    text, vision = KINDS[kind]
    model = common.make(
        kind, text=dict(rope_parameters=SECTIONS) | text | changes, vision=vision, seed=seed, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=tied,
    )  # fmt: skip
    remember_longer(model)
    if "linear_num_key_heads" in text and not tied:  # five layers deep: 1e-4 shall not be a matter of rounding
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(0.6)
    return model


def make_text_model(kind: str):
    model = make_text(f"{kind}_text", **DELTA | (EXPERTS if kind == "qwen3_5_moe" else {}))
    remember_longer(model)
    return model


def remember_longer(model) -> None:
    """Makes recurrent memories decay over hundreds of tokens: initially an output is mostly that of one token."""
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


def written(pieces, rng: np.random.Generator, write: Callable[[bool, int, int], list[int]]) -> Row:
    """Text and images as in `ROWS`; `write`: the tokens of an image or a video of frames with so many tokens each."""
    ids: list[int] = []
    extra: dict[str, list] = {}
    for piece in pieces:
        if isinstance(piece, int):
            ids += rng.integers(3, 90, piece).tolist()
            continue
        kind, *grid = piece
        ids += write(kind == "video", grid[0], grid[1] * grid[2] // MERGE**2)
        values = normal(rng, int(np.prod(grid)), VALUES)
        extra.setdefault("pixel_values_videos" if kind == "video" else "pixel_values", []).extend(values)
        extra.setdefault(f"{kind}_grid_thw", []).append(grid)
    return Row(ids, extra)


def make_row(pieces, rng: np.random.Generator, *, apart: bool = False, seconds: bool = False) -> Row:
    """One prompt as transformers' processor returns it.

    `apart`: each frame of a video after a time of two tokens; `seconds`: with those of a frame, as Qwen2.5-VL has them.
    """

    def write(is_video: bool, frames: int, count: int) -> list[int]:
        if not (is_video and apart):
            return [START, *[VIDEO if is_video else IMAGE] * (frames * count), END]
        return [x for _ in range(frames) for x in (*rng.integers(3, 90, 2).tolist(), START, *[VIDEO] * count, END)]

    row = written(pieces, rng, write)
    if seconds and "video_grid_thw" in row.extra:
        row.extra["second_per_grid_ts"] = [SECONDS] * len(row.extra["video_grid_thw"])
    kinds = [(token == IMAGE) + 2 * (token == VIDEO) for token in row.ids]
    return Row(row.ids, {**row.extra, "mm_token_type_ids": [kinds]})


def make_rows(rows=ROWS, seed: int = 0, **options) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [make_row(row, rng, **options) for row in rows]


# --- other forms of a folder ------------------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def write_copy(folder: Path, raw: dict, tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))


def flatten(saved, target) -> None:
    """The folder in the form of transformers 4: text fields in the outer object, old names, keys without levels."""
    new_names(saved, target.with_name("new"))
    source = target.with_name("new")
    tensors, raw = tensors_of(source), raw_of(source)
    assert any(key.startswith("model.language_model.") for key in tensors)
    old = {key.replace("model.visual.", "visual.").replace(".language_model.", "."): v for key, v in tensors.items()}
    text, vision = raw.pop("text_config"), raw["vision_config"]
    rope = text.pop("rope_parameters")
    for nested in ("model_type", "layer_types"):
        text.pop(nested)
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["rope_theta"] = rope["rope_theta"]
    vision.pop("rope_parameters", None)
    vision["in_chans"] = vision.pop("in_channels")
    write_copy(target, {**text, **raw}, old)


def further(saved, target) -> None:
    write_copy(target, raw_of(saved.folder), tensors_of(saved.folder) | {"mtp.fc.weight": np.zeros((2, 2), np.float32)})


def longer_names(saved, target) -> None:
    named = {key.replace("model.", "model.language_model."): x for key, x in tensors_of(saved.folder).items()}
    write_copy(target, raw_of(saved.folder), named)


def rewrite_experts(change, saved, target) -> None:
    """`change` replaces the tensors of the experts."""
    made: dict[str, np.ndarray] = {}
    for key, x in tensors_of(saved.folder).items():
        made |= change(key, x) if ".experts." in key else {key: x}
    write_copy(target, raw_of(saved.folder), made)


def exchanged(key, x):
    """A tensor of all experts with its last two axes exchanged, as published: [E, D, 2 F] or [E, F, D]."""
    return {key: np.ascontiguousarray(x.swapaxes(1, 2))}


def apart(key, x):
    """The tensors of each expert, as in folders of Qwen3-MoE, from one tensor of all experts."""
    start, _, name = key.rpartition(".")
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
    return {f"{start}.{i}.{name}.weight": np.ascontiguousarray(part) for i, expert in enumerate(x)
            for name, part in zip(names, np.split(expert, len(names)), strict=True)}  # fmt: skip


# --- the records ------------------------------------------------------------------------------------------------------

FIRST, SECOND = ((4, ("image", 1, 4, 6), 3), (7,)), ((2, ("image", 1, 6, 2), 5), (3,))
ROPE = {"rope_theta": 1e4, "rope_type": "default"}
UNFIT = (
    ({"pixel_values": np.zeros((3, VALUES), np.float32)}, "pixel_values have shape"),
    ({"image_grid_thw": None}, "no image_grid_thw"),
    ({"image_grid_thw": np.array([[1, 3, 6]])}, "multiples of 2"),
    ({"pixel_values": None}, "but 0 image"),
    ({"pixel_values": np.zeros((48, VALUES)), "image_grid_thw": np.array([[1, 4, 6]] * 2)}, "but 2 image"),
    ({"pixel_values": np.zeros((32, VALUES)), "image_grid_thw": np.array([[1, 4, 8]])}, "need 8"),
)


def few_frames(lines, columns):
    """Time is never the greatest axis: then transformers puts the text after a video among its frames."""
    return max(1, max(lines, columns) / 2 / 1.4)


def turns(**options):
    return make_rows(FIRST, **options), make_rows(SECOND, seed=1, **options)


def record(kind: str, *, rows=ROWS, apart: bool = False, **others) -> Record:
    """Rows with two images, an image and a video, one image, and none."""
    options = dict(apart=apart, seconds=kind == "qwen2_5_vl")
    most = {} if apart else {"most": few_frames}
    return Record(
        make=partial(make, kind), rows=lambda config: make_rows(rows, **options), ties=True,
        turns=partial(turns, **options), row=lambda rng: make_row(random_pieces(rng, **most), rng, **options),
        prompts=lambda: make_rows(((2, ("image", 1, 4, 6), 3),)), unfit=UNFIT, **others,
    )  # fmt: skip


QWEN2 = dict(
    copies={"flat": flatten},
    refused=(
        *text(
            ({"rope_parameters": ROPE}, "mrope_section"),
            ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "ntk", "mrope_section": [2, 1, 1]}}, "ntk"),
            ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1, "layer_types": None},
             "window=0"),
        ),
        *fields("vision_config", ("hidden_act", "relu"), ("in_channels", 4)),
        *vision(({"hidden_size": 64, "out_hidden_size": 64}, "64 channels")),
    ),
)  # fmt: skip
QWEN3 = (
    *text(
        ({"rope_parameters": ROPE}, "mrope_section is missing"),
        ({"rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": False}}, "mrope_interleaved"),
        ({"rope_parameters": ROPE | {"mrope_section": [4, 4]}}, "three whole numbers"),
        ({"model_type": "qwen3_vl_moe_text"}, "text_config.model_type"),
        ({"num_hidden_layers": 2}, "names 3 blocks, but the decoder has 2 layers"),
    ),
    *vision(
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"num_position_embeddings": 26}, "must be a square"),
        ({"deepstack_visual_indexes": [2, 0]}, "increasing indices of 3 blocks"),
        ({"deepstack_visual_indexes": [3]}, "increasing indices of 3 blocks"),
        ({"out_hidden_size": 64}, "64 channels"),
    ),
)
EXPERTS_REFUSED = text(
    ({"norm_topk_prob": False}, "norm_topk_prob=False"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob='yes'"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds the number of experts, 6"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
    ({"num_local_experts": -1}, "num_experts=-1"),
    ({"num_experts": 8}, "num_experts=8 and num_local_experts=6"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ({"mlp_only_layers": [4]}, "mlp_only_layers=.4. must be indices of 4 layers"),
    ({"moe_intermediate_size": None, "hidden_act": "gelu"}, "hidden_act"),
    ({"model_type": "qwen3_vl_text"}, "text_config.model_type"),
)
DELTA_REFUSED = (
    *text(
        ({"layer_types": ["linear_attention"] * 5}, "layer_types has no full_attention"),
        ({"layer_types": ["full_attention"] * 4}, "must be a list of 5 layers"),
        ({"layer_types": ["sliding_attention"] * 5}, "each linear_attention or full_attention"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0"),
        ({"linear_num_key_heads": 4}, "linear_num_key_heads=4 must divide linear_num_value_heads=6"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 must be at least 2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim=0"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"model_type": "qwen3_vl_text"}, "text_config.model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25, "mrope_section": [2, 2, 2]}}, "half of 8 channels"),
    ),
    *vision(({"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes"), ({"out_hidden_size": 64}, "64 channels")),
)
# With more than a chunk of tokens in two rows; no number of tokens is a multiple of a chunk.
LONGER = (
    (4, ("image", 1, 4, 6), 70, ("image", 1, 6, 2), 5),
    (2, ("image", 1, 6, 10), 1, ("video", 2, 4, 4), 6),
    (3, ("image", 1, 4, 8), 61),
    (12,),
)
# float64 differs by 5e-5 from both sides even without experts; it depends on the processor.
QWEN3_5 = dict(rows=LONGER, apart=True, within=2e-4, new=64, copies={"further": further})
LAYOUTS = {name: partial(rewrite_experts, change) for name, change in (("exchanged", exchanged), ("apart", apart))}
RECORDS = {
    "qwen2_vl": record("qwen2_vl", **QWEN2),
    "qwen2_5_vl": record("qwen2_5_vl", **QWEN2),
    "qwen3_vl": record("qwen3_vl", apart=True, before=True, refused=QWEN3),
    "qwen3_vl_moe": record("qwen3_vl_moe", apart=True, before=True, refused=EXPERTS_REFUSED, copies=LAYOUTS),
    "qwen3_5": record("qwen3_5", **QWEN3_5, refused=DELTA_REFUSED),
    "qwen3_5_moe": record("qwen3_5_moe", **QWEN3_5),
    **{f"{kind}_text": Record(  # positions with one axis, prompts of several chunks
        make=partial(make_text_model, kind), rows=lambda config: [Row(x.ids) for x in make_rows(((150,), (64,), (7,)))],
        text_only=False, copies={"longer names": longer_names}) for kind in ("qwen3_5", "qwen3_5_moe")},
}  # fmt: skip


# What needs no torch.
_TOWER3 = forms.QWEN | dict(hidden_size=16, out_hidden_size=32, intermediate_size=24, num_position_embeddings=9,
                            deepstack_visual_indexes=[0, 1])  # fmt: skip
_IDS = dict(image_token_id=forms.IMAGE, video_token_id=forms.VIDEO, tie_word_embeddings=False)
_QWEN3 = dict(_IDS, vision_config=_TOWER3, text_config=tiny_text("qwen3_vl_text")
              | dict(head_dim=8, rope_scaling=dict(mrope_section=[2, 1, 1])))  # fmt: skip
_DELTA = dict(
    num_hidden_layers=5, head_dim=16, linear_key_head_dim=6, linear_value_head_dim=5, linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear", "linear", "full")],
    rope_parameters=dict(partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
)  # fmt: skip
_QWEN3_5 = dict(_IDS, vision_config=_TOWER3 | dict(deepstack_visual_indexes=[]),
                text_config=tiny_text("qwen3_5_text") | _DELTA)  # fmt: skip
VISION = "<|vision_start|><|image_pad|><|vision_end|>"


def tiny(raw, system: str = "", **others) -> Tiny:
    return Tiny(raw=raw, picture=native, prompt=system + forms.CHATML.format(image=VISION), **others)


TINY = {
    "qwen2_vl": tiny(
        forms.MROPE | dict(vision_config=forms.QWEN | dict(embed_dim=16, hidden_size=32, mlp_ratio=2)), forms.SYSTEM,
        renames=forms.QWEN_4,
        processors=(("qwen2_vl", "Qwen2VL", pixel_limits(40)),),
        refused=(({"max_pixels": "64"}, "256 and '64' pixels"), ({"min_pixels": True}, "True and"),
            ({"max_pixels": [64]}, "must be positive numbers"), ({"max_pixels": 50}, "in order"),
            ({"size": 56}, "size=56 must be an object"), ({"max_pixels": float("inf")}, "positive numbers"),
            ({"do_resize": "false"}, "do_resize='false'"),
            ({"do_normalize": 1}, "do_normalize=1 must be true or false"), ({"resample": "bicubic"}, "not valid"),
            ({"image_mean": ["a", 1, 1]}, "not valid"), ({"rescale_factor": {}}, "not valid"),
            ({"patch_size": "14"}, "patch_size='14'"), ({"patch_size": 16}, "different checkpoints"),
            ({"image_processor_type": ["Qwen2VLImageProcessor"]}, "image_processor_type"),
            ({"do_resize": False}, "do_resize"),
            ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
            ({"min_pixels": 10, "max_pixels": 5}, "positive")),
    ),
    "qwen2_5_vl": tiny(
        forms.MROPE | dict(vision_config=forms.QWEN | dict(hidden_size=16, out_hidden_size=32, intermediate_size=24,
            window_size=16, fullatt_block_indexes=[1])), forms.SYSTEM, renames=forms.QWEN_4),
    "qwen3_vl": tiny(_QWEN3, renames=forms.QWEN_4),
    "qwen3_vl_moe": tiny(
        _QWEN3 | dict(text_config=_QWEN3["text_config"] | forms.EXPERTS | dict(model_type="qwen3_vl_moe_text")),
        renames=forms.QWEN_4),
    "qwen3_5": tiny(_QWEN3_5),
    "qwen3_5_moe": tiny(_QWEN3_5 | dict(text_config=tiny_text("qwen3_5_moe_text") | _DELTA | forms.EXPERTS | dict(
        mlp_only_layers=[], shared_expert_intermediate_size=10))),
}  # fmt: skip
