"""Tiny SmolVLM and Idefics3 models made by transformers, their prompts and records."""

from functools import partial

import numpy as np

from tests.families import forms
from tests.families.common import Record, Row, fields, make, prompt, sums_to_one
from tests.families.forms import Tiny, marked, tiny_text

MARKED = 99  # the token of an image
KINDS = {  # pixels of a tile and of a patch, patches per side of a token, vision tokens of a tile
    "idefics3": (55, 2, 9, 9),  # 27 patches per side, as in SmolVLM-2.2B, and a leftover pixel
    "smolvlm": (28, 7, 2, 4),
}


def make_smolvlm(kind: str, *, tied: bool = False, **changes):
    """A two-block tower and a two-layer decoder with grouped heads; the head of granite-docling is tied."""
    side, patch, merge, _ = KINDS[kind]
    return make(
        kind, text=dict(model_type="llama", rms_norm_eps=1e-5, tie_word_embeddings=tied) | changes,
        vision=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=side,
                    patch_size=patch),
        image_token_id=MARKED, scale_factor=merge, pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip


def smolvlm_rows(kind: str, seed: int = 0) -> list[Row]:
    """An image of three tiles and one of one tile; an image of one tile; no image."""
    side, _, _, tokens = KINDS[kind]
    rng, rows = np.random.default_rng(seed), []
    for pictures, words in (((3, 1), 12), ((1,), 13), ((), 9)):
        pixels = np.zeros((4, 3, side, side), np.float32)  # transformers pads rows with tiles of zeros
        pixels[: sum(pictures)] = rng.normal(size=(sum(pictures), 3, side, side))
        mask = np.broadcast_to(pixels.any(axis=(1, 2, 3))[:, None, None], (4, side, side)).astype(int)
        runs = [[95, *([96, *[MARKED] * tokens] * tiles), 95] for tiles in pictures]
        rows.append(prompt(rng, words, runs, pixel_values=[pixels], pixel_attention_mask=[mask]))
    return rows


def smolvlm(kind: str) -> Record:
    side, _, _, tokens = KINDS[kind]
    return Record(
        make=partial(make_smolvlm, kind), rows=lambda config: smolvlm_rows(kind), attention=sums_to_one,
        ties=kind == "idefics3", turns=lambda: (smolvlm_rows(kind, 1)[1:], smolvlm_rows(kind, 2)[:2]),
        refused=(
            *fields("vision_config", ("hidden_act", "gelu"), ("model_type", "clip_vision_model"), ("num_channels", 1),
                    ("image_size", [28, 14]), ("patch_size", 64)),
            *fields("text_config", ("model_type", "gemma")),
            *fields(None, ("scale_factor", 5), ("scale_factor", 0.5), ("image_token_id", "<image>")),
        ),
        unfit=(
            ({"pixel_values": lambda pixels: pixels * (np.arange(4) < 3)[:, None, None, None]},
             rf"{5 * tokens} image tokens, but 4 image\(s\) or tile\(s\) of {tokens}"),
            ({"pixel_values": lambda pixels: pixels[..., :-2]}, rf"expected \[images, 3, {side}, {side}\]"),
            ({"pixel_values": lambda pixels: 0 * pixels}, "0 image"),
        ),
    )  # fmt: skip


RECORDS = {kind: smolvlm(kind) for kind in KINDS}


# What needs no torch.
TINY = {
    "idefics3": Tiny(
        raw=dict(text_config=tiny_text(), vision_config=forms.INTERN, image_token_id=forms.IMAGE),
        picture=marked,
        processors=(("idefics3", "Idefics3", forms.EDGE),),
        prompt="<|im_start|>User:<image>what?<end_of_utterance>\nAssistant: yes"
            "<end_of_utterance>\nUser: why?<end_of_utterance>\nAssistant:",
    ),
    "smolvlm": Tiny(
        raw=dict(text_config=tiny_text(), vision_config=forms.INTERN, image_token_id=forms.IMAGE),
        picture=marked,
        processors=(("smolvlm", "SmolVLM", forms.EDGE),),
        refused=(({"max_image_size": {"longest_edge": 56}}, "the files belong to different checkpoints"),
            ({"max_image_size": None}, "max_image_size=None is not supported"),
            ({"size": {"shortest_edge": 56}}, "only longest_edge"), ({"size": 42}, "size=42 is not supported"),
            ({"size": {"longest_edge": 5000}}, "1 to 4096 pixels"),
            ({"do_image_splitting": "yes"}, "must be true or false"),
            ({"image_processor_type": "CLIPImageProcessor"}, "not supported")),
        prompt="<|im_start|>User:<image>what?<end_of_utterance>\nAssistant: yes"
            "<end_of_utterance>\nUser: why?<end_of_utterance>\nAssistant:",
    ),
}  # fmt: skip
