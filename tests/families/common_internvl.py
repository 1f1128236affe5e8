"""Tiny random InternVLs made by transformers, their prompts and records."""

import copy
from functools import partial

import numpy as np

from tests.families import forms
from tests.families.common import Record, Row, fields, make, new_names, normal, prompt
from tests.families.forms import Tiny, intern, tiny_text
from tests.parity.conftest import torch
from vlkv.families.internvl import CONVERSATIONS

IMAGE, START, END = 99, 98, 97
SIDE, TOKENS = 56, 16  # pixels of a tile, vision tokens of a tile
STOP = 96

_SIZES = {"qwen3": dict(head_dim=16)}  # heads together wider than the decoder, as in Qwen3-0.6B
_SIZES["qwen3_moe"] = dict(head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
                           mlp_only_layers=[], norm_topk_prob=True)  # fmt: skip
TOWER = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, image_size=SIDE,
             patch_size=7)  # fmt: skip
SMALL_VIT = dict(norm_type="layer_norm", attention_bias=True, use_qk_norm=False)  # as InternViT-300M
LARGE_VIT = dict(norm_type="rms_norm", attention_bias=False, use_qk_norm=True)  # as InternViT-6B


def make_internvl(kind, vision, *, seed=0, tied=False, layer=-1, **changes):
    """A three-layer tower with 64 patches per tile, and a two-layer decoder with grouped heads."""
    return make(
        "internvl", text=dict(model_type=kind, max_position_embeddings=256) | _SIZES.get(kind, {}) | changes,
        vision=TOWER | vision, seed=seed, image_token_id=IMAGE, image_seq_length=TOKENS, vision_feature_layer=layer,
        tie_word_embeddings=tied,
    )  # fmt: skip


def make_rows(seed=0) -> list[Row]:
    """An image of three tiles and one of one tile; an image of one tile; none."""
    rng = np.random.default_rng(seed)
    return [
        prompt(rng, words, [[START, *[IMAGE] * (TOKENS * tiles), END] for tiles in pictures],
               pixel_values=normal(rng, sum(pictures), 3, SIDE, SIDE))
        for pictures, words in (((3, 1), 12), ((1,), 13), ((), 9))
    ]  # fmt: skip


def class_attention(saved, inputs, received) -> None:
    """What the class token gives to each vision token: the sum over its four patches, in the tower's last block."""
    tower = copy.deepcopy(saved.model.model.vision_tower)
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = tower(torch.tensor(inputs.pixels[:5]), output_attentions=True).attentions[-1][:, :, 0, 1:]
    theirs = theirs.numpy().reshape(5, 2, 4, 2, 4, 2).sum(axis=(3, 5)).reshape(5, 2, TOKENS)
    first = inputs.is_vision[0]
    np.testing.assert_allclose(received[0, 0][:, first], np.concatenate(theirs[:4], axis=-1), atol=1e-5)
    assert (received[0, 0][:, ~first] == 0).all()


UNFIT = (
    ({"pixel_values": lambda pixels: pixels[:4]}, r"80 image tokens, but 4 image\(s\) or tile\(s\) of 16"),
    ({"pixel_values": lambda pixels: pixels[:, :, :28]}, r"expected \[images, 3, 56, 56\]"),
)
REFUSED = (
    *fields("vision_config", ("use_mean_pooling", False), ("use_absolute_position_embeddings", False),
            ("hidden_act", "quick_gelu"), ("norm_type", "group_norm"), ("image_size", [56, 28])),
    *fields(None, ("downsample_ratio", 0.3), ("projector_hidden_act", "relu"),
            ("vision_feature_select_strategy", "full"), ("vision_feature_layer", [-1, -2])),
    *fields("text_config", ("model_type", "gemma"), ("model_type", "gpt_oss")),
)  # fmt: skip
RECORDS = {
    name: Record(make=partial(make_internvl, *kind, **changes), rows=lambda config: make_rows(), **others)
    for name, kind, changes, others in (
        ("internvl", ("qwen2", SMALL_VIT), {},
         dict(ties=True, copies={"new": new_names}, unfit=UNFIT, refused=REFUSED, attention=class_attention)),
        # RMSNorm, queries and keys normalised over all heads, no biases; a Llama decoder with a tied head.
        ("internvl-6b", ("llama", LARGE_VIT), dict(tied=True, layer=-2), {}),
        ("internvl3_5", ("qwen3", SMALL_VIT), dict(seed=2), {}),
        ("internvl3_5-6b", ("qwen3", LARGE_VIT), dict(seed=2), {}),
        ("internvl3_5_moe", ("qwen3_moe", SMALL_VIT), dict(seed=2), {}),
    )
}  # fmt: skip


# What needs no torch.
TINY = {
    "internvl": Tiny(
        raw=dict(text_config=tiny_text("qwen2"), vision_config=forms.INTERN, image_token_id=forms.IMAGE,
                 tie_word_embeddings=False),
        picture=intern,
        renames=forms.TRANSFORMERS_4,
        processors=(("got_ocr2", "GotOcr2", forms.WHOLE | dict(max_patches=5)),),
        refused=(({"image_processor_type": "CLIPImageProcessor"}, "json: .*not supported"),
            ({"do_center_crop": True}, "crop"),
            ({"max_patches": 0}, "max_patches"), ({"size": {"shortest_edge": 42}}, "size"),
            ({"size": {"height": 14, "width": 14}}, "14")),
        prompt=forms.CHATML.format(image="[I]\n"),
    ),
    "internvl_chat": Tiny(
        raw=dict(llm_config=tiny_text("internlm2") | dict(bias=False), vision_config=forms.INTERN, ps_version="v2",
            template="internlm2-chat", added_tokens={"<IMG_CONTEXT>": forms.IMAGE, "<|im_end|>": 2}),
        picture=intern,
        renames=((r"^lm_head\.", "language_model.output."),),
        prompt=CONVERSATIONS["internlm2-chat"]["system"] + "<|im_end|>"
        + forms.CHATML.format(image="[I]\n").replace("<|im_end|>\n", "<|im_end|>"),
    ),
}  # fmt: skip
