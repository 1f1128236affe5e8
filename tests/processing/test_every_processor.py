"""Every family's image processor beside transformers' on PIL; its videos and prompts are in files of their own."""

import importlib
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families import forms, tiny
from tests.processing.conftest import noise
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.processing import Video

CASES = {f"{family}, {kind}, {number}": (family, module, kind, settings) for family, bases in tiny.PROCESSORS.items()
         for number, (module, kind, settings) in enumerate(bases)}  # fmt: skip
# These families share a processor with another, but have their own code or sizes.
for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_5"):
    CASES[name] = (name, *tiny.PROCESSORS["qwen2_vl"][0])
CASES["glm_ocr"] = ("glm_ocr", *tiny.PROCESSORS["glm46v"][0])
CASES["gemma4, 280"] = ("gemma4", "gemma4", "Gemma4", tiny.PROCESSORS["gemma4"][0][2] | {"max_soft_tokens": 280})
CASES["smolvlm, whole"] = ("smolvlm", "smolvlm", "SmolVLM",
                           tiny.PROCESSORS["smolvlm"][0][2] | {"do_image_splitting": False})  # fmt: skip
TILE = 9  # tokens of a square or a tile of the tiny configs
ONE_COUNT = ("llava, ", "gemma3, Gemma3, 1", "smolvlm, whole")  # images of every size have the same number of tokens
CONFIG: dict[str, dict[str, Any]] = {
    "gemma4": dict(vision_soft_tokens_per_image=280,
                   vision_config=tiny.RAW["gemma4"]["vision_config"] | {"position_embedding_size": 300}),
}  # fmt: skip


def config_of(family: str):
    raw = tiny.RAW[family] | CONFIG.get(family, {})
    return config_from_hf({**raw, "model_type": family})


def open_pictures(family: str, folder, settings: dict[str, Any], layout: str = "checkpoint"):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return config_of(family).open_pictures(folder, layout)


def settings_of(family: str) -> dict[str, Any]:
    _, kind, settings = tiny.PROCESSORS.get(family, tiny.PROCESSORS["qwen2_vl"])[0]
    return {"image_processor_type": f"{kind}ImageProcessor", **settings}


def features(family: str, name: str, **fields: Any):
    """The count of a processor of transformers that computes it from the size."""

    def count(made, reader, size):
        counter = object.__new__(getattr(processing(family), name))
        vars(counter).update(image_processor=reader, **fields)
        return counter._get_number_of_features(*size[::-1], forms.SIDE, forms.SIDE)

    return count


def processing(module: str):
    return importlib.import_module(f"transformers.models.{module}.processing_{module}")


def patches(made, reader, size):
    return made["image_grid_thw"].prod() // 4


# The number of tokens, from what transformers' image processor returns.
COUNTS = {
    "llava": lambda made, reader, size: TILE,
    "llava_next": features("llava_next", "LlavaNextProcessor", patch_size=forms.PATCH, num_additional_image_tokens=0),
    "llava_onevision": features("llava_onevision", "LlavaOnevisionProcessor", num_image_tokens=TILE,
                                vision_aspect_ratio="anyres_max_2"),
    "internvl": lambda made, reader, size: TILE * made["num_patches"][0],
    **dict.fromkeys(("idefics3", "smolvlm"), lambda made, reader, size: TILE * made["pixel_values"].shape[1]),
    "gemma3": lambda made, reader, size: TILE * len(made["pixel_values"]),
    "gemma4": lambda made, reader, size: made["num_soft_tokens_per_image"][0],
}  # fmt: skip
# The text in place of an image: the processor's module and class, and the tokens that it knows.
FAKE, MARKED = "<fake_token_around_image>", dict(image_token="<image>", image_seq_len=TILE)
TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "internvl": ("internvl", "InternVLProcessor", dict(
        start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>", image_seq_length=TILE)),
    "idefics3": ("idefics3", "Idefics3Processor", MARKED | dict(
        fake_image_token=FAKE, global_image_tag="<global-img>")),
    "smolvlm": ("smolvlm", "SmolVLMProcessor", MARKED | dict(fake_image_token=FAKE, global_image_token="<global-img>")),
    "gemma3": ("gemma3", "Gemma3Processor", dict(
        full_image_sequence=f"\n\n<start_of_image>{'<image_soft_token>' * TILE}<end_of_image>\n\n")),
    "gemma4": ("gemma4", "Gemma4Processor", dict(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")),
}  # fmt: skip


def sizes_of(family: str) -> list[tuple[int, int]]:
    """Of 200 random pictures, and of squares and strips; transformers fails on longer ones."""
    rng, longest = np.random.default_rng(0), 1 if family in ("llava", "llava_next", "llava_onevision") else 4
    found = np.exp(rng.uniform(np.log(longest), np.log(300), (200, 2))).astype(int).tolist()
    halves = [(4 * i, 4 * j) for i in range(1, 14) for j in (3, 5)]  # of a token of 8 pixels: rounding goes to even
    return [*map(tuple, found), *halves, (21, 21), (42, 42), (43, 42), (60, 50), (50, 60), (400, 7), (7, 400)]


@pytest.mark.parametrize("case", CASES)
def test_pictures_of_200_sizes_are_those_of_transformers(tmp_path, case):
    """All arrays that a model gets, the number of tokens and the text around them."""
    family, module, kind, settings = CASES[case]
    ours = open_pictures(family, tmp_path, {"image_processor_type": f"{kind}ImageProcessor", **settings})
    pil = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    theirs, counts = getattr(pil, f"{kind}ImageProcessorPil")(**settings), set()
    nested = family in ("idefics3", "smolvlm")
    given = {"return_row_col_info": True} if nested else {"crop_to_patches": True} if family == "internvl" else {}
    for seed, size in enumerate(sizes_of(family)):
        image = noise(*size, seed)
        read = ours.read(image)
        wanted = theirs([[image]] if nested else [image], return_tensors="np", **given)
        for name in set(read.arrays) & set(wanted):
            found, array = np.ravel(read.arrays[name]), np.ravel(wanted[name])
            np.testing.assert_allclose(found, array, atol=1e-5, err_msg=f"{name}, {size}")
        assert read.tokens == COUNTS.get(family, patches)(wanted, theirs, size), size
        if family in TEXTS:
            where, name, like = TEXTS[family]
            text = getattr(processing(where), name).replace_image_token(types.SimpleNamespace(**like), wanted, 0)
            assert read.text == text, size
        counts.add(read.tokens)
    assert "pixel_values" in read.arrays and (len(counts) > 2) != case.startswith(ONE_COUNT)


CHANGES: tuple[dict[str, Any], ...] = (
    {}, *({step: None} for step in ("do_rescale", "do_normalize", "do_resize", "do_center_crop", "do_pad")),
    {"do_normalize": None, "image_mean": None}, {"do_rescale": None, "rescale_factor": None}, {"size": forms.SIDE},
    {"size": 6 * forms.PATCH}, {"size": None}, {"resample": None}, {"image_std": None}, {"do_image_splitting": None},
    {"default_to_square": True, "size": forms.SIDE}, {"size": {"shortest_edge": 2 * forms.SIDE}}, {"resample": 2},
    {"size": {"height": forms.SIDE, "width": forms.SIDE}, "do_center_crop": False}, {"crop_size": forms.SIDE},
    {"do_normalize": False}, {"do_rescale": False}, {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 1.0]},
)  # fmt: skip


@pytest.mark.parametrize(("family", "number"), [
    (family, number) for family, bases in tiny.PROCESSORS.items() for number in range(len(bases))])  # fmt: skip
def test_null_and_other_forms_of_settings_are_as_in_transformers_or_refused(family, number):
    from benchmarks.fuzz.images import Base

    base = Base(family, *tiny.PROCESSORS[family][number])
    found = [base.outcome({"image_processor_type": base.name, **base.settings, **change}) for change in CHANGES]
    kinds = [kind for kind, _ in found]
    assert kinds[0] == "equal" and kinds.count("equal") >= 8
    assert [(change, *one) for change, one in zip(CHANGES, found, strict=True) if one[0] == "differs"] == []


@pytest.mark.parametrize(("family", "change", "says"), [
    (kind, *each) for kind, entry in tiny.TINY.items() for each in entry.refused])  # fmt: skip
def test_settings_that_are_refused(tmp_path, monkeypatch, family, change, says):
    monkeypatch.chdir(tmp_path)  # long paths are cut in messages
    with pytest.raises(InputError, match=says):
        open_pictures(family, Path(), settings_of(family) | change).read(noise(40, 40))


@pytest.mark.parametrize("family", sorted({*tiny.PROCESSORS, "qwen3_vl"} - {"llava"}))
def test_layouts_of_other_families_are_refused(tmp_path, family):
    with pytest.raises(InputError, match="layout='pad'"):
        open_pictures(family, tmp_path, settings_of(family), layout="pad")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"preprocessor_config\.json: no such file"):
        config_of("llava_next").open_pictures(tmp_path, "checkpoint")


FRAME, LONG, UNEQUAL = Video([noise(30, 30)]), noise(3000, 9), Video([noise(30, 30), noise(30, 31)])
PICTURES = [
    *(
        ("too long and thin", kind, LONG)
        for kind in (*tiny.PROCESSORS, "qwen3_vl")
        if tiny.TINY[kind].picture is forms.native
    ),
    *(("differ in size", family, UNEQUAL) for family in ("qwen2_vl", "glm4v")),
    *(("does not support videos", family, FRAME) for family in ("llava_next", "gemma3", "gemma4")),
    ("at least 2 frames: give a single frame as an image", "glm4v", FRAME),
]


@pytest.mark.parametrize(("says", "family", "picture"), PICTURES, ids=lambda x: x if isinstance(x, str) else "")
def test_pictures_that_are_refused(tmp_path, says, family, picture):
    pictures = open_pictures(family, tmp_path, settings_of(family))
    with pytest.raises(InputError, match=says):
        pictures.read(picture)
