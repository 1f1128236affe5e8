"""Tiny GLM-4.1V, GLM-4.6V and GLM-OCR models made by transformers, their prompts and records."""

import re
from functools import partial

import numpy as np

from tests.families import common, forms
from tests.families.common import Record, Row, random_pieces, raw_of, rope_index, text, vision
from tests.families.common_qwen import FIRST, MERGE, SECOND, UNFIT, tensors_of, write_copy, written
from tests.families.forms import Tiny, native, pixel_limits
from tests.parity.conftest import torch

START, END, IMAGE, VIDEO_START, VIDEO_END = 95, 96, 97, 98, 99
# Each row: numbers of text tokens, and between them images and videos as (frames, lines and columns of patches).
# transformers cannot run images and videos in one prompt, because it counts the tokens of both for each.
ROWS = (
    (4, ("image", 1, 4, 6), 3, ("image", 1, 6, 2), 5),
    (2, ("video", 2, 4, 4), 6, ("video", 1, 2, 12), 1),
    (3, ("image", 1, 14, 8), 9),
    (12,),
)


SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
OWN = {"glm_ocr": dict(head_dim=24, rope_parameters={"mrope_section": [4, 5, 3], "partial_rotary_factor": 1.0}),
       "glm46v": dict(model_type="glm4v_text")}  # fmt: skip
TOWER = dict(depth=3, hidden_size=32, num_heads=2, patch_size=4, spatial_merge_size=MERGE, temporal_patch_size=2,
             image_size=20, out_hidden_size=64, intermediate_size=40)  # fmt: skip


def make(kind: str, *, tied: bool = False, **changes):
    """A tower with three blocks and a table of 5 x 5 positions; GLM-OCR's heads are wider than its decoder."""
    text = dict(hidden_size=64, num_attention_heads=4) | OWN.get(kind, {}) | changes
    return common.make(
        kind, text=text | dict(rope_parameters=SECTIONS | text.get("rope_parameters", {})),
        vision=TOWER | ({"model_type": "glm4v_vision"} if kind == "glm46v" else {}), image_token_id=IMAGE,
        image_start_token_id=START, image_end_token_id=END, video_start_token_id=VIDEO_START,
        video_end_token_id=VIDEO_END, tie_word_embeddings=tied,
    )  # fmt: skip


def make_row(pieces, rng: np.random.Generator) -> Row:
    """One prompt as transformers' processor returns it; a time of two tokens follows each frame of a video."""

    def write(is_video: bool, frames: int, count: int) -> list[int]:
        image = [START, *[IMAGE] * count, END]
        if not is_video:
            return image
        return [VIDEO_START, *(x for _ in range(frames) for x in (*image, *rng.integers(3, 90, 2).tolist())), VIDEO_END]

    row = written(pieces, rng, write)
    ids = np.array(row.ids)
    in_video = np.cumsum((ids == VIDEO_START) * 1 - (ids == VIDEO_END))
    kinds = ((ids == IMAGE) * (1 + in_video)).tolist()
    return Row(row.ids, {**row.extra, "mm_token_type_ids": [kinds]} if row.extra else {})


def make_rows(rows=ROWS, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [make_row(row, rng) for row in rows]


def mixed(model, row: Row):
    """transformers' logits and positions for a prompt with images and videos, from the features of both."""
    given = {name: torch.tensor(np.asarray(value)) for name, value in row.extra.items()}
    ids, kinds = torch.tensor([row.ids]), given["mm_token_type_ids"]
    with torch.no_grad():
        x = model.get_input_embeddings()(ids)
        images = model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output
        videos = model.get_video_features(given["pixel_values_videos"], given["video_grid_thw"]).pooler_output
        x[kinds == 1], x[kinds == 2] = torch.cat(images), torch.cat(videos)
        positions, _ = rope_index(model, row)
        return model(inputs_embeds=x, position_ids=torch.tensor(positions.T)[:, None]).logits[0].numpy(), positions


ROPE = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
REFUSED = (
    *text(
        ({"rope_parameters": ROPE}, "mrope_section is missing"),
        ({"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}, "half of 8 channels"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.3}}, "rotates 4 of 16|mrope_section"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, "rotates 24 of 16 channels"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.2}}, "rotates 3 of 16 channels"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": "half"}}, "must be a number"),
        ({"head_dim": 32, "rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}, "head_dim=32"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "glm_ocr_text"}, "text_config.model_type"),
        ({"model_type": "glm4v_moe_text"}, re.escape("glm4v_moe (GLM-4.5V, GLM-4.6V) is not supported")),
    ),
    *vision(
        ({"model_type": "glm_ocr_vision"}, "vision_config.model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
        ({"image_size": 3}, "at least patch_size"),
        ({"image_size": [20, 20]}, "whole number"),
        ({"out_hidden_size": 48}, "48 channels"),
        ({"hidden_size": 36}, "multiple of four channels"),
        ({"attention_bias": "yes"}, "attention_bias"),
    ),
)


def further(saved, folder) -> None:
    """With a layer that predicts further tokens, as the published GLM-OCR has one."""
    tensors, layer = tensors_of(saved.folder), "language_model.layers.1."
    more = {key.replace("layers.1.", "layers.2."): x for key, x in tensors.items() if layer in key}
    more["model.language_model.layers.2.eh_proj.weight"] = tensors["lm_head.weight"]
    write_copy(folder, raw_of(saved.folder), tensors | more)


def record(kind: str, rows=ROWS, text=None, **others) -> Record:
    """Rows with two images, two videos, one image that is larger than the table, and none."""
    return Record(
        make=partial(make, kind, **text or {}), rows=lambda config: make_rows(rows), ties=True,
        turns=lambda: (make_rows(FIRST), make_rows(SECOND, seed=1)),
        row=lambda rng: make_row(random_pieces(rng, lambda lines, columns: 5), rng),
        prompts=lambda: make_rows(((2, ("image", 1, 4, 6), 3),)), **others,
    )  # fmt: skip


RECORDS = {
    "glm4v": record("glm4v", refused=REFUSED, unfit=UNFIT),
    "glm_ocr": record("glm_ocr", unfit=UNFIT, copies={"further": further},
                      refused=text(({"attention_bias": True}, r"text_config\.attention_bias=True"))),
    # Its checkpoints have another `model_type`; here a quarter of the channels is rotated.
    "glm46v": record("glm46v", (ROWS[0], ROWS[-1]), dict(rope_parameters={"partial_rotary_factor": 0.25,
                                                               "mrope_section": [1, 1, 0]})),
}  # fmt: skip


# What needs no torch.
TINY = {
    "glm4v": Tiny(
        raw=dict(text_config=forms.GLM, vision_config=forms.GLM_TOWER, **forms.GLM_TOKENS),
        picture=native,
        processors=(("glm4v", "Glm4v", pixel_limits(80)),),
    ),
    "glm46v": Tiny(
        raw=dict(text_config=forms.GLM, vision_config=forms.GLM_TOWER, **forms.GLM_TOKENS),
        picture=native,
        processors=(("glm46v", "Glm46V", pixel_limits(80)),),
        refused=(({"patch_size": 14}, "different checkpoints"), ({"do_resize": False}, "do_resize"),
            ({"image_processor_type": "Qwen2VLImageProcessor"}, "is not supported"),
            ({"processor_class": "Qwen2VLProcessor"}, "processor_class='Qwen2VLProcessor' is not supported"),
            ({"size": {"height": 28, "width": 28}}, "shortest_edge and longest_edge")),
    ),
    "glm_ocr": Tiny(
        raw=dict(text_config=forms.GLM, vision_config=forms.GLM_TOWER, **forms.GLM_TOKENS),
        picture=native,
    ),
}  # fmt: skip
