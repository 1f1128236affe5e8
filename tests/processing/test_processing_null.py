"""Settings of image processors that are null, left out or given in another form, beside transformers' classes."""

from __future__ import annotations

import importlib
import json

import numpy as np
import PIL.Image
import pytest

from tests.families import tiny
from vlkv.errors import InputError
from vlkv.families import config_from_hf

SIDE, LARGE = tiny.SIDE, 6 * tiny.PATCH
SQUARE = dict(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
NATIVE = dict(patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 40})
# Family -> module of transformers, class, settings.
CASES = {
    "llava": ("llava", "LlavaImageProcessor", SQUARE | dict(do_pad=True)),
    "llava_next": ("llava_next", "LlavaNextImageProcessor", SQUARE | dict(image_grid_pinpoints=tiny.PINPOINTS)),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessor", dict(size={"height": LARGE, "width": LARGE}, max_patches=4)),
    "idefics3": ("idefics3", "Idefics3ImageProcessor",
                 dict(size={"longest_edge": 3 * LARGE}, max_image_size={"longest_edge": LARGE})),
    "qwen2_vl": ("qwen2_vl", "Qwen2VLImageProcessor", NATIVE),
    "gemma3": ("gemma3", "Gemma3ImageProcessor", dict(size={"height": LARGE, "width": LARGE})),
}  # fmt: skip
CHANGES = [
    {}, *({step: None} for step in ("do_rescale", "do_normalize", "do_resize", "do_center_crop", "do_pad")),
    {"do_normalize": None, "image_mean": None}, {"do_rescale": None, "rescale_factor": None}, {"size": SIDE},
    {"size": LARGE}, {"size": None}, {"resample": None}, {"image_std": None}, {"default_to_square": True, "size": SIDE},
    {"size": {"shortest_edge": 2 * SIDE}}, {"do_image_splitting": None},
]  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_null_and_other_forms(family, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    module, name, settings = CASES[family]
    kind = getattr(importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), f"{name}Pil")
    config = config_from_hf({**tiny.RAW[family], "model_type": family})
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 64, 3)).astype(np.uint8))
    compared = 0
    for change in CHANGES:
        fields = {"image_processor_type": name, **settings, **change}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
        given = {"crop_to_patches": True} if family == "internvl" else {}
        try:
            nested = [[image]] if family == "idefics3" else [image]
            wanted = kind.from_pretrained(tmp_path)(images=nested, return_tensors="np", **given)["pixel_values"]
        except (ValueError, TypeError, AttributeError):
            continue  # transformers cannot use it
        try:
            found = config.open_pictures(tmp_path, "checkpoint").image(image, 1).arrays["pixel_values"]
        except InputError:
            assert change, "the settings themselves are supported"
            continue
        compared += 1
        np.testing.assert_allclose(found.ravel(), np.asarray(wanted).ravel(), atol=1e-4, err_msg=str(change))
    assert compared >= 4


def test_a_bare_number_is_not_a_longest_edge(tmp_path):
    fields = dict(CASES["idefics3"][2], size=LARGE, image_processor_type="Idefics3ImageProcessor")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    config = config_from_hf({**tiny.RAW["idefics3"], "model_type": "idefics3"})
    with pytest.raises(InputError, match="size=42 is not supported"):
        config.open_pictures(tmp_path, "checkpoint")
