"""A tiny PaddleOCR-VL made by transformers, its prompts and its record."""

import numpy as np

from tests.families import forms
from tests.families.common import Record, Row, make, normal, prompt, raw_of, text, vision
from tests.families.common_qwen import END, IMAGE, ROPE, START, tensors_of, write_copy
from tests.families.forms import Tiny, native, pixel_limits, tiny_text

PATCH, MERGE = 4, 2


def make_paddleocr(*, tied: bool = False):
    """A tower with three blocks and a table of 5 x 5 positions; heads of the decoder are wider than its width."""
    return make(
        "paddleocr_vl",
        text=dict(head_dim=16, tie_word_embeddings=tied,
                  rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}),
        vision=dict(hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, image_size=22,
                    patch_size=PATCH, spatial_merge_size=MERGE),
        image_token_id=IMAGE, video_token_id=98, vision_start_token_id=START, vision_end_token_id=END,
        tie_word_embeddings=tied,
    )  # fmt: skip


def paddleocr_row(rng, pictures, words: int = 3) -> Row:
    """Images with so many lines and columns of patches."""
    runs = [[START, *[IMAGE] * (lines * columns // MERGE**2), END] for lines, columns in pictures]
    patches = sum(lines * columns for lines, columns in pictures)
    return prompt(rng, words, runs, ("mm_token_type_ids", IMAGE), pixel_values=normal(rng, patches, 3, PATCH, PATCH),
                  image_grid_thw=[[1, *shape] for shape in pictures])  # fmt: skip


def paddleocr_rows(*prompts, seed: int = 0) -> list[Row]:
    """By default more and fewer patches than the table, also only two in a line."""
    rng = np.random.default_rng(seed)
    return [paddleocr_row(rng, *one) for one in prompts or (([(4, 6), (10, 2)], 9), ([(6, 12)], 11), ([], 11))]


def random_paddleocr_row(rng) -> Row:
    pictures = [tuple(int(side) for side in 2 * rng.integers(1, 8, 2)) for _ in range(4)]
    return paddleocr_row(rng, pictures, int(rng.integers(1, 6)))


def published_paddleocr(saved, folder) -> None:
    """Renames tensors to those of the published checkpoint, which is flat and has some that are not used."""
    raw = raw_of(saved.folder)
    flat = raw | raw.pop("text_config") | {"model_type": "paddleocr_vl", "tie_word_embeddings": False}
    rope = flat.pop("rope_parameters")
    flat |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": "default"}, "use_3d_rope": True}
    flat["vision_config"] |= {"model_type": "paddleocr_vl", "temporal_patch_size": 2, "tokens_per_second": 2}
    renames = {"model.projector.": "mlp_AR.", "model.visual.": "visual.", "model.language_model.": "model."}
    tensors = {}
    for key, x in tensors_of(saved.folder).items():
        tensors[next((key.replace(new, old) for new, old in renames.items() if key.startswith(new)), key)] = x
    assert any(key.startswith("mlp_AR.") for key in tensors) and "model.embed_tokens.weight" in tensors
    unused = ("head.probe", "head.mlp.fc1.weight", "embeddings.packing_position_embedding.weight")
    write_copy(folder, flat, tensors | {f"visual.vision_model.{name}": np.zeros(2, np.float32) for name in unused})


RECORDS = {
    "paddleocr_vl": Record(
        make=make_paddleocr, rows=lambda config: paddleocr_rows(), copies={"flat": published_paddleocr}, ties=True,
        turns=lambda: (paddleocr_rows(([(4, 6)], 3), ([], 4)), paddleocr_rows(([(2, 8)], 5), ([], 2), seed=5)),
        row=random_paddleocr_row,
        unfit=(({"pixel_values": lambda pixels: pixels.reshape(len(pixels), -1)},
                r"shape \(\d+, 48\), expected \[\d+, 3, 4, 4\] from image_grid_thw"),),
        refused=(
            *text(
                ({"rope_parameters": ROPE}, "mrope_section is missing"),
                ({"rope_parameters": ROPE | {"mrope_section": [4, 4]}}, "three whole numbers"),
                ({"model_type": "ernie4_5"}, "text_config.model_type='ernie4_5'"),
                ({"use_bias": True}, "use_bias=True"),
                ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
            ),
            *vision(
                ({"hidden_act": "silu"}, "vision_config.hidden_act"),
                ({"num_attention_heads": 3}, "32 channels must be 3 heads"),
                ({"image_size": 3}, "image_size=3 is less than patch_size=4"),
                ({"spatial_merge_size": 0}, "spatial_merge_size=0"),
                ({"layer_norm_eps": "small"}, "layer_norm_eps='small'"),
                ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear'"),
                ({"rope_parameters": 3}, "rope_parameters=3 must be an object"),
            ),
        ),
    ),
}  # fmt: skip


# What needs no torch.
TINY = {
    "paddleocr_vl": Tiny(
        raw=dict(
            text_config=tiny_text("paddleocr_vl_text") | dict(head_dim=8, rope_scaling=dict(mrope_section=[2, 1, 1])),
            vision_config=forms.TOWER | dict(image_size=12, patch_size=4), image_token_id=forms.IMAGE,
            tie_word_embeddings=False),
        picture=native,
        renames=((r"^model\.projector\.", "mlp_AR."), *forms.QWEN_4),
        processors=(  # the second as published since version 1.5
            ("paddleocr_vl", "PaddleOCRVL", pixel_limits(40) | dict(temporal_patch_size=1)),
            ("paddleocr_vl", "PaddleOCRVL",
             dict(patch_size=4, merge_size=2, min_pixels=256, max_pixels=2560, temporal_patch_size=1))),
        refused=(({"image_processor_type": "Qwen2VLImageProcessor"}, "supported: PaddleOCRVLImageProcessor"),
            ({"temporal_patch_size": 2}, "temporal_patch_size=2, but the tower"),
            ({"do_resize": False}, "do_resize=False"),
            ({"size": {"height": 384, "width": 384}}, "shortest_edge and longest_edge")),
        prompt="<|begin_of_sentence|>User: <|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>what?\nAssistant: yes</s>"
            "User: why?\nAssistant: ",
    ),
}  # fmt: skip
