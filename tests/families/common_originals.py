"""Prompts and records of families that transformers has not in their authors' form: see `original_models.py`."""

import json

import numpy as np

from tests.families import forms
from tests.families.common import NEW, Record, Row, normal, outer, prompt, save_file
from tests.families.forms import Tiny, square, windows
from tests.parity.conftest import VOCABULARY, perturb, torch


def original(name: str, *arguments):
    from tests.families import original_models

    with torch.random.fork_rng():  # `perturb` adds to biases, which torch draws at random
        torch.manual_seed(0)
        model = getattr(original_models, name)(*arguments).eval()
    perturb(model)
    return model


# --- LLaVA-1.5 and MobileVLM-V2 ---------------------------------------------------------------------------------------

TOWER = "clip-vit-tiny"


def write_llava(model, folder, *, tower: str = "inside", kind: str | None = None, **changes) -> None:
    kind = kind or {"llava": "llava_llama"}.get(model.kind, model.kind)
    folder.mkdir(exist_ok=True)
    raw = model.decoder.config.to_dict()
    raw |= {
        "model_type": kind, "mm_vision_tower": f"somewhere/{TOWER}", "mm_hidden_size": 16,
        "mm_projector_type": {"llava": "mlp2x_gelu", "llava_llama": "mlp2x_gelu"}.get(kind, "ldpnetv2"),
        "mm_vision_select_layer": -2, "mm_vision_select_feature": "patch", "image_aspect_ratio": "pad",
        "mm_use_im_start_end": False, "mm_use_im_patch_token": False, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(model.tensors(tower=tower == "inside"), folder / "model.safetensors")
    (folder / TOWER).mkdir(exist_ok=True)
    (folder / TOWER / "config.json").write_text(json.dumps({"vision_config": model.tower.config.to_dict()}))
    if tower == "beside":
        tensors = {key: value.clone() for key, value in model.tower_tensors().items()}
        save_file({**tensors, "text_projection.weight": torch.zeros(3)}, folder / TOWER / "model.safetensors")


def square_rows(side: int, run: list[int]) -> list[Row]:
    """One picture, two, none."""
    rng = np.random.default_rng(0)
    return [prompt(rng, words, [run] * count, pixel_values=normal(rng, count, 3, side, side))
            for count, words in ((1, 9), (2, 12), (0, 7))]  # fmt: skip


# --- EVE --------------------------------------------------------------------------------------------------------------

EVE_WIDTH, EVE_HEADS, SQUARE = 32, 8, 140
SHAPES = [(2, 3), (5, 1), (1, 4)]  # windows of 28 pixels


def eve_config(model=None, **changes) -> dict:
    raw = {} if model is None else model.decoder.config.to_dict()
    return raw | {
        "model_type": "eve", "mm_vision_tower": "openai/eve-patch14-anypixel-672", "mm_hidden_size": EVE_WIDTH,
        "mm_projector_type": "mlp2x_gelu", "mm_use_im_start_end": False, **changes,
    }  # fmt: skip


def write_eve(model, folder) -> None:
    (folder / "config.json").write_text(json.dumps(eve_config(model)))
    save_file(model.tensors(), folder / "model.safetensors")


def tokens_of(lines: int, columns: int) -> int:
    return 1 + lines * (columns + 1)


def eve_rows() -> list[Row]:
    """One picture, two, none; the pictures lie somewhere on their squares."""
    rng, rows = np.random.default_rng(0), []
    for shapes, words in ((SHAPES[:1], 9), (SHAPES[1:], 12), ([], 7)):
        pictures = rng.normal(size=(len(shapes), 4, SQUARE, SQUARE)).astype(np.float32)
        for picture, (lines, columns) in zip(pictures, shapes, strict=True):
            top, left = (SQUARE // 28 - lines) // 2 * 28, (SQUARE // 28 - columns) // 2 * 28
            picture[3] = 0
            picture[3, top : top + 28 * lines, left : left + 28 * columns] = 1
        runs = [[VOCABULARY] * tokens_of(*shape) for shape in shapes]
        rows.append(prompt(rng, words, runs, pixel_values=list(pictures)))
    return rows


def torn(pixels):
    pixels[0][3, 60, 60] = 0
    return pixels


# --- Qwen-VL ----------------------------------------------------------------------------------------------------------

START, QWEN_IMAGE = 96, 98  # <img>, </img>, and the token of each vision token
WIDTH, INNER, QWEN_SIDE, PATCH, QWEN_HEADS, TOKENS = 256, 32, 80, 4, 4, 16
LENGTH = 60  # tokens that the decoder was trained on


def qwen_config(**changes) -> dict:
    visual = dict(heads=QWEN_HEADS, image_size=QWEN_SIDE, image_start_id=START, layers=2, mlp_ratio=1.5,
                  output_dim=WIDTH, patch_size=PATCH, width=INNER, n_queries=TOKENS)  # fmt: skip
    return dict(
        model_type="qwen", vocab_size=120, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        kv_channels=64, intermediate_size=160, layer_norm_epsilon=1e-6, seq_length=LENGTH, no_bias=True,
        eos_token_id=2, visual=visual,
    ) | changes  # fmt: skip


def make_qwen_vl():
    model = original("Qwen")
    model.grow_queries()
    return model


def write_qwen_vl(model, folder) -> None:
    (folder / "config.json").write_text(json.dumps(qwen_config()))
    save_file(model.tensors(), folder / "model.safetensors")


def qwen_rows() -> list[Row]:
    """While they are answered, queries grow."""
    rows = square_rows(QWEN_SIDE, [START, *[QWEN_IMAGE] * TOKENS, START + 1])
    assert max(len(row.ids) for row in rows) < LENGTH < max(len(row.ids) for row in rows) + NEW - 4
    return rows


BESIDE = {
    "with the tower in a folder of its name": lambda saved, folder: write_llava(saved.model, folder, tower="beside")
}
KNOWN = {"mm_vision_tower": "openai/clip-vit-large-patch14"}
RECORDS = {
    "llava_llama": Record(
        make=lambda: original("Llava", "llava"), rows=lambda config: square_rows(8, [VOCABULARY] * 16),
        write=write_llava, copies=BESIDE, refused=outer(
        ({"mm_projector_type": "linear"}, "mm_projector_type='linear'"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end=True"),
        ({"image_aspect_ratio": "anyres"}, "image_aspect_ratio='anyres'"),
        ({"mm_patch_merge_type": "spatial_unpad"}, "mm_patch_merge_type='spatial_unpad'"),
        ({"mm_vision_select_feature": "cls", "mm_hidden_size": 1024, **KNOWN}, "mm_vision_select_feature='cls'"),
        ({"mm_hidden_size": 20, **KNOWN}, "mm_hidden_size=20"),
        ({"mm_vision_tower": "google/.."}, "mm_vision_tower='google/..' is not"),
    )),
    "mobilevlm": Record(
        make=lambda: original("Llava", "mobilevlm"), rows=lambda config: square_rows(48, [VOCABULARY] * 144),
        write=write_llava, copies=BESIDE),
    "eve": Record(
        make=lambda: original("Eve"), rows=lambda config: eve_rows(), write=write_eve,
        prompts=lambda: eve_rows()[:1],
        unfit=(({"input_ids": lambda ids: np.delete(ids, 1, axis=1), "attention_mask": None},
                "8 image tokens, but 1 image"), ({"pixel_values": torn}, "rectangle of whole windows")),
        refused=outer(
            ({"mm_vision_tower": "openai/eve-anyratio-res800-patch16"}, "mm_vision_tower='openai/eve-anyratio"),
            ({"mm_projector_type": "linear"}, "mm_projector_type='linear'"),
            ({"mm_use_im_start_end": True}, "mm_use_im_start_end=True"),
        )),
    "qwen_vl": Record(
        make=make_qwen_vl, rows=lambda config: qwen_rows(), write=write_qwen_vl,
        refused=outer(
            ({"visual": None}, "Qwen-VL is supported"),
            ({"rotary_pct": 0.5}, "rotary_pct=0.5"),
            ({"no_bias": False}, "no_bias=False"),
            ({"hidden_size": 128}, "visual.output_dim=256"),
        )),
}  # fmt: skip


# What needs no torch.
TINY = {
    "llava_llama": Tiny(
        raw=forms.ORIGINAL,
        picture=square,
        renames=forms.LLAVA_ORIGINAL,
        prompt=forms.VICUNA,
    ),
    "mobilevlm": Tiny(
        raw=forms.ORIGINAL | dict(
            mm_projector_type="ldpnetv2", vision_config=forms.TOWER | dict(image_size=24, patch_size=2)),
        picture=square,
        renames=forms.MOBILEVLM,
        prompt=forms.VICUNA,
    ),
    "qwen": Tiny(
        raw=forms.DECODER | dict(hidden_size=128, num_attention_heads=2, kv_channels=64, seq_length=512, no_bias=True,
            visual=dict(heads=2, image_size=16, image_start_id=forms.START, layers=2, mlp_ratio=1.5,
                        output_dim=128, patch_size=4, width=16, n_queries=16)),
        picture=square,
        prompt="Picture 1: <img><imgpad></img>\nwhat?yeswhy?",
    ),
    "eve": Tiny(
        raw=forms.DECODER | dict(mm_vision_tower="eve-patch14-anypixel-672", mm_projector_type="mlp2x_gelu",
            mm_hidden_size=32),
        picture=windows,
        prompt=forms.VICUNA,
    ),
}  # fmt: skip
