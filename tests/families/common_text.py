"""LLaVA-1.5 in transformers' form and text models: their prompts and records."""

from functools import partial

import numpy as np

from tests.families import forms
from tests.families.common import Record, Row, new_names, normal, prompt, raw_of
from tests.families.common_qwen import tensors_of, write_copy
from tests.families.forms import Tiny, square, tiny_text
from tests.parity.conftest import IMAGE_TOKEN, make_llava, make_text


def llava_rows() -> list[Row]:
    """Two images, one image, none."""
    rng = np.random.default_rng(0)
    return [prompt(rng, words, [[IMAGE_TOKEN] * 16] * count, pixel_values=normal(rng, count, 3, 28, 28))
            for count, words in ((2, 12), (1, 14), (0, 9))]  # fmt: skip


def oldest_names(saved, target) -> None:
    """The names of transformers 4: a `vision_model` level, and buffers that are not used."""
    tensors = tensors_of(saved.folder)
    old = {key.replace("vision_tower.", "vision_tower.vision_model.", 1): value for key, value in tensors.items()}
    old["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    old["vision_tower.vision_model.embeddings.position_ids"] = np.arange(17)[None]
    raw = raw_of(saved.folder)
    raw["text_config"]["rope_theta"] = raw["text_config"].pop("rope_parameters")["rope_theta"]
    write_copy(target, raw, old)


LLAVA = {
    "llava": {},
    "llava-mha-tied": dict(num_key_value_heads=6, tied=True),
    "llava-mqa-bias-theta": dict(num_key_value_heads=1, head_dim=12, attention_bias=True,
                                 rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llava-last-layer": dict(vision_feature_layer=-1),
    "llava-first-layer": dict(vision_feature_layer=1),
}  # fmt: skip
WINDOW = 8
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, head_dim=12)
TEXT = {
    "mistral, window": dict(sliding_window=WINDOW, num_key_value_heads=3),
    "qwen2, window": dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "phi3, window": dict(sliding_window=WINDOW),
    "gemma3_text, window": dict(
        num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=2, head_dim=10, query_pre_attn_scalar=30,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=5e5, rope_local_base_freq=5e3),
    # A window over all positions changes no mask, but its layers rotate at their own base.
    "gemma3_text, long window": dict(sliding_window=256, layer_types=["sliding_attention", "full_attention"]),
    "llama": {},
    "llama, tied": dict(tie_word_embeddings=True),
    "qwen2": {},
    "mistral": dict(num_key_value_heads=3),
    "qwen3": dict(head_dim=20),
    "qwen3, bias": dict(attention_bias=True, tie_word_embeddings=True),
    "qwen3_moe": MOE | dict(norm_topk_prob=True),
    "qwen3_moe, sparse": MOE | dict(norm_topk_prob=False, num_hidden_layers=4, decoder_sparse_step=2),
    "qwen3_moe, mlp": MOE | dict(mlp_only_layers=[1], num_experts_per_tok=1, tie_word_embeddings=True),
    "qwen3_moe, no experts": MOE | dict(num_experts=0),
}  # fmt: skip


def text_rows() -> list[Row]:
    """Two rows are longer than the window, and one is shorter."""
    rng = np.random.default_rng(0)
    return [Row(rng.integers(3, 99, count).tolist()) for count in (20, 15, WINDOW - 2)]


def record(make, rows, **others) -> Record:
    """A later turn has the same prompts in another order."""
    return Record(make=make, rows=lambda config: rows(), text_only=False, turns=lambda: (rows()[1:], rows()[:2]),
                  **others)  # fmt: skip


FORMS = dict(ties=True, copies={"new": new_names, "oldest": oldest_names})
RECORDS = {
    name: record(partial(make_llava, **changes), llava_rows, **(FORMS if name == "llava" else {}))
    for name, changes in LLAVA.items()
} | {name: record(partial(make_text, name.split(",")[0], **changes), text_rows) for name, changes in TEXT.items()}


# What needs no torch.
TINY = {
    "llava": Tiny(
        raw=dict(text_config=tiny_text(), vision_config=forms.TOWER, image_token_index=forms.IMAGE),
        picture=square,
        renames=forms.LLAVA_4,
        processors=(("clip", "CLIP", forms.CROPPED), ("llava", "Llava", forms.CROPPED | dict(do_pad=True)),
            ("siglip", "Siglip", dict(size={"height": forms.SIDE, "width": forms.SIDE}))),
        refused=tuple((change, r"preprocessor_config\.json: ") for change in (
            {"image_processor_type": "ViTImageProcessor"}, {"size": {"longest_edge": 28}},
            {"size": {"shortest_edge": 0}}, {"crop_size": "wide"}, {"resample": 99}, {"image_mean": [0.5, 0.5]},
            {"image_std": "none"}, {"pad_size": {"height": 4, "width": 4}})),
        prompt="USER: [I]\nwhat? ASSISTANT: yes</s>USER: why? ASSISTANT:",
    ),
}  # fmt: skip
