"""Tiny Gemma 3 and Gemma 4 models, their records, and prompts that are longer than the window."""

import shutil
from functools import partial

import numpy as np

from tests.families import forms
from tests.families.common import Record, Row, fields, make, normal, prompt, save_file, sums_to_one
from tests.families.forms import Tiny, patches, square, tiny_text
from tests.parity.conftest import torch

IMAGE, BEGIN, END, AUDIO, VIDEO = 118, 116, 117, 114, 115
SLIDING, FULL = "sliding_attention", "full_attention"

# --- Gemma 3 ----------------------------------------------------------------------------------------------------------

SIDE, PATCH, TOKENS, WINDOW = 28, 7, 4, 6  # 16 patches; an image of 4 tokens


def make_gemma3():
    """A two-block tower; five layers, of which the third and the last have full attention."""
    return make(
        "gemma3",
        text=dict(num_hidden_layers=5, head_dim=10, query_pre_attn_scalar=30, sliding_window=WINDOW,
                  rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=5e5, rope_local_base_freq=5e3,
                  layer_types=[SLIDING, *[SLIDING, FULL] * 2]),
        vision=dict(model_type="siglip_vision_model", hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                    num_attention_heads=2, image_size=SIDE, patch_size=PATCH, vision_use_head=False),
        mm_tokens_per_image=TOKENS, image_token_index=IMAGE, boi_token_index=BEGIN, eoi_token_index=END,
        tie_word_embeddings=True,
    )  # fmt: skip


def gemma3_rows(seed: int = 0) -> list[Row]:
    rng, run = np.random.default_rng(seed), [BEGIN, *[IMAGE] * TOKENS, END]
    return [
        prompt(rng, words, [run] * count, ("token_type_ids", IMAGE), pixel_values=normal(rng, count, 3, SIDE, SIDE))
        for count, words in ((2, 12), (1, 19), (0, 15))
    ]


def mean_attention(saved, inputs, received) -> None:
    """The attention of a token is the mean of its patches, in the order of the tokens."""
    sums_to_one(saved, inputs, received * (SIDE // PATCH) ** 2 / TOKENS)


# --- Gemma 4 ----------------------------------------------------------------------------------------------------------

PATCH4, MERGE, MOST = 4, 2, 12
SERVER = dict(attention_k_eq_v=True, num_global_key_value_heads=1, use_bidirectional_attention="vision")
KINDS = {
    "e2b": dict(
        num_hidden_layers=7, layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_kv_shared_layers=3, hidden_size_per_layer_input=6, use_double_wide_mlp=True),
    "26b-a4b": dict(
        num_hidden_layers=5, layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL], enable_moe_block=True, num_experts=6,
        top_k_experts=2, moe_intermediate_size=12, **SERVER),
    "31b": dict(num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=0, **SERVER),
    # Combinations that are not published: K = V with shared layers and inputs per layer; and a decoder without windows.
    "mixed": dict(
        num_hidden_layers=6, layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=2,
        hidden_size_per_layer_input=6, **SERVER),
    "full": dict(num_hidden_layers=3, layer_types=[FULL] * 3, num_kv_shared_layers=1, use_double_wide_mlp=True),
}  # fmt: skip


def make_gemma4(kind: str):
    """A two-block tower and a decoder; the head is tied in one kind, as in the published checkpoints."""
    small = kind in ("e2b", "full")
    model = make(
        "gemma4",
        text=dict(intermediate_size=40, num_attention_heads=4, head_dim=8, global_head_dim=16, sliding_window=WINDOW,
                  vocab_size_per_layer_input=120, hidden_size_per_layer_input=0, final_logit_softcapping=20.0)
        | KINDS[kind],
        vision=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, head_dim=12, patch_size=PATCH4, pooling_kernel_size=MERGE,
                    position_embedding_size=16, standardize=not small, use_clipped_linears=small),
        audio_config=None, image_token_id=IMAGE, boi_token_id=BEGIN, eoi_token_id=END, audio_token_id=AUDIO,
        video_token_id=VIDEO, tie_word_embeddings=kind == "31b", vision_soft_tokens_per_image=MOST,
    )  # fmt: skip
    # Attention without 1 / sqrt(H) is far from uniform, and norms enlarge small outputs, so layers would multiply the
    # rounding errors of both sides.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight") or ".post_" in name:
                parameter.mul_(0.5)
        # No answer contains these tokens, whose embeddings transformers replaces also while decoding.
        model.get_output_embeddings().weight[[AUDIO, VIDEO, IMAGE]] = 0.0
    bounds = dict(input_min=-1.0, input_max=1.2, output_min=-1.5, output_max=1.1)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[-1]
        if leaf in bounds:
            buffer.fill_(bounds[leaf])
        elif leaf in ("layer_scalar", "std_bias", "std_scale"):
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def picture(rng, lines: int, columns: int) -> dict:
    """An image as the processor returns it, padded to `MOST` tokens."""
    most, count = MOST * MERGE**2, lines * columns
    at = np.stack(np.meshgrid(np.arange(columns), np.arange(lines)), axis=-1).reshape(-1, 2)
    return {
        "pixel_values": [np.pad(rng.random((count, 3 * PATCH4**2)), [(0, most - count), (0, 0)]).astype(np.float32)],
        "image_position_ids": [np.pad(at, [(0, most - count), (0, 0)], constant_values=-1)],
    }


def gemma4_rows(seed: int = 0) -> list[Row]:
    """Two images of different shapes; one image, with more tokens than the window; none."""
    rng, rows = np.random.default_rng(seed), []
    for shapes, words in ((((4, 2), (2, 6)), 12), (((6, 6),), 17), ((), 15)):
        runs = [[BEGIN, *[IMAGE] * (lines * columns // MERGE**2), END] for lines, columns in shapes]
        pictures = [picture(rng, *shape) for shape in shapes]
        arrays = {name: [one[name][0] for one in pictures] for name in ("pixel_values", "image_position_ids")}
        rows.append(prompt(rng, words, runs, ("mm_token_type_ids", IMAGE), **arrays))
    return rows


def write_unused(saved, folder, **more) -> None:
    """With tensors that are not used, of audio and keys of shared layers, and with `more`."""
    unused = {"model.audio_tower.output_proj.weight": (3, 2), "model.embed_audio.embedding_projection.weight": (3, 2),
              "model.language_model.layers.5.self_attn.k_proj.weight": (16, 48),
              "model.language_model.layers.6.self_attn.k_norm.weight": (16,)} | more  # fmt: skip
    shutil.copytree(saved.folder, folder)
    state = {name: tensor.clone() for name, tensor in saved.model.state_dict().items()}
    save_file(state | {name: torch.ones(shape) for name, shape in unused.items()}, folder / "model.safetensors")


def gemma4(kind: str, **others) -> Record:
    return Record(make=partial(make_gemma4, kind), rows=lambda config: gemma4_rows(),
                  turns=lambda: (gemma4_rows(1)[1:], gemma4_rows(2)[:2]), **others)  # fmt: skip


RECORDS = {
    "gemma3": Record(
        make=make_gemma3, rows=lambda config: gemma3_rows(),
        turns=lambda: (gemma3_rows(1)[1:], gemma3_rows(2)[:2]), attention=mean_attention,
        refused=(
            *fields(None, ("mm_tokens_per_image", 5), ("mm_tokens_per_image", 9), ("mm_tokens_per_image", 0),
                    ("image_token_id", "<image>")),
            *fields("vision_config", ("hidden_act", "gelu"), ("model_type", "clip_vision_model")),
            *fields("text_config", ("model_type", "gemma2"), ("final_logit_softcapping", 30.0),
                    ("use_bidirectional_attention", True)),
        )),
    "gemma4-e2b": gemma4("e2b", copies={"unused": write_unused}, unfit=(
        ({"image_position_ids": None}, "no image_position_ids"),
        ({"pixel_values": np.zeros((1, 9, 8))}, "pixel_values have shape"),
        ({"image_position_ids": lambda at: 0 * at}, "must be multiples of 2"),
        ({"image_position_ids": lambda at: at[..., ::-1]}, "line by line"),
    ), refused=(
        *fields(None, ("vision_soft_tokens_per_image", 0), ("image_token_id", "<image>")),
        *fields("vision_config", ("hidden_activation", "silu"), ("head_dim", 8), ("num_key_value_heads", 1),
                ("model_type", "siglip_vision_model")),
        *fields("text_config", ("model_type", "gemma2"), ("use_bidirectional_attention", "all"),
                ("num_kv_shared_layers", 6), ("layer_types", ["chunked_attention"] * 7),
                ("hidden_size_per_layer_input", -1), ("hidden_activation", "silu"), ("final_logit_softcapping", "x")),
    )),
    "gemma4-26b-a4b": gemma4("26b-a4b", attention=sums_to_one),
    **{f"gemma4-{kind}": gemma4(kind) for kind in ("31b", "mixed")},
    "gemma4-full": gemma4("full", new=0),  # transformers' `generate` fails on it
}  # fmt: skip


# What needs no torch.
TINY = {
    "gemma3": Tiny(
        raw=dict(
            text_config=tiny_text("gemma3_text") | dict(head_dim=8, query_pre_attn_scalar=12, sliding_window=8,
                                                    num_hidden_layers=4, sliding_window_pattern=2),
            vision_config=forms.SIGLIP | dict(image_size=6 * forms.PATCH), image_token_index=forms.IMAGE,
            mm_tokens_per_image=9, tie_word_embeddings=True),
        picture=square,
        renames=forms.LLAVA_4,
        processors=(("gemma3", "Gemma3", forms.WHOLE | dict(
            do_pan_and_scan=True, pan_and_scan_min_crop_size=20, pan_and_scan_max_num_crops=4,
            pan_and_scan_min_ratio_to_activate=1.2)), ("gemma3", "Gemma3", forms.WHOLE)),
        refused=(({"size": {"height": 56, "width": 56}}, "the files belong to different checkpoints"),
            ({"do_pan_and_scan": "yes"}, "must be true or false"),
            ({"pan_and_scan_max_num_crops": 0}, "pan_and_scan_max_num_crops=0 must be a number of at least 1"),
            ({"pan_and_scan_min_crop_size": 2.5}, "pan_and_scan_min_crop_size=2.5"),
            ({"image_processor_type": "CLIPImageProcessor"}, "not supported")),
        prompt="<bos><start_of_turn>user\n<start_of_image>what?<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n"
            "<start_of_turn>user\nwhy?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "gemma4": Tiny(
        raw=dict(
            text_config=tiny_text("gemma4_text") | dict(
                head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=8,
                num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=2,
                hidden_size_per_layer_input=6, vocab_size_per_layer_input=forms.VOCABULARY,
                final_logit_softcapping=20.0,
                use_bidirectional_attention="vision"),
            vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                               num_key_value_heads=2, head_dim=8, patch_size=4, pooling_kernel_size=2,
                               position_embedding_size=16, standardize=True),
            image_token_id=forms.IMAGE, audio_token_id=99, video_token_id=100, vision_soft_tokens_per_image=16,
            tie_word_embeddings=True),
        picture=patches,
        processors=(("gemma4", "Gemma4", dict(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)),),
        refused=(({"patch_size": 16}, "the files belong to different checkpoints"),
            ({"pooling_kernel_size": 3}, "the files belong to different checkpoints"),
            ({"max_soft_tokens": 100}, "max_soft_tokens=100 must be one of 70, 140"),
            ({"max_soft_tokens": 560}, "max_soft_tokens=560 exceeds vision_soft_tokens_per_image=280"),
            ({"do_resize": False}, "do_resize=False is not supported"),
            ({"image_processor_type": "CLIPImageProcessor"}, "not supported")),
        prompt="<bos><|turn>user\n<|image|>what?<turn|>\n<|turn>model\nyes<turn|>\n<|turn>user\nwhy?<turn|>\n<|turn>model\n",
    ),
}  # fmt: skip
