"""Cases of image processors: the same pictures through transformers' classes on PIL and through vlkv."""

import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from benchmarks.fuzz.configs import ABSENT, CHANGES, Case, Raw
from tests.families import forms, tiny
from vlkv.errors import InputError
from vlkv.families import config_from_hf

_S, _L = forms.SIDE, 6 * forms.PATCH
_PICTURES = ((37, 25), (25, 61), (_S, _S), (130, 14), (9, 60), (64, 48), (3, 5), (_L, _L))
_SKIPPED = ("return_tensors", "device", "disable_grouping", "input_data_format", "image_seq_length")


class Base:
    """A processor's settings, which the cases change."""

    def __init__(self, family: str, module: str, name: str, settings: Raw) -> None:
        self.family, self.name, self.settings = family, f"{name}ImageProcessor", settings
        raw = {**tiny.RAW[family], "model_type": family}
        if family == "gemma4":
            raw["vision_soft_tokens_per_image"] = 280
            raw["vision_config"] = {**raw["vision_config"], "position_embedding_size": 300}
        self.config = config_from_hf(raw)
        processing = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
        self.kind = getattr(processing, f"{self.name}Pil")

    def cases(self) -> Iterator[Case]:
        """Every field of the class: null, absent, false, true and other numbers; and other forms."""
        seen: list[Raw] = []
        for change in ({}, *self._fields(), *CHANGES["images"]):
            raw = {"image_processor_type": self.name, **self.settings, **change}
            raw = {name: value for name, value in raw.items() if value != ABSENT}
            if raw not in seen:
                seen.append(raw)
                yield f"{self.name} {json.dumps(change)}", raw

    def _fields(self) -> Iterator[Raw]:
        for name in self.kind.valid_kwargs.__annotations__:
            if name not in _SKIPPED:
                value = self.settings.get(name, getattr(self.kind, name, None))
                yield from ({name: None}, {name: ABSENT})
                if isinstance(value, bool) or name.startswith("do_"):
                    yield from ({name: False}, {name: True})
                elif isinstance(value, int):
                    yield from ({name: value + 1}, {name: 1}, {name: 0})
                elif isinstance(value, float):
                    yield from ({name: 2 * value}, {name: 1.0})

    def outcome(self, raw: Raw) -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "preprocessor_config.json").write_text(json.dumps(raw))
            results = [self._picture(Path(folder), *size) for size in _PICTURES]
        kinds = [kind for kind, _ in results]
        first = next((kind for kind in ("differs", "equal", "refused") if kind in kinds), "unusable")
        return results[kinds.index(first)]

    def _picture(self, folder: Path, width: int, height: int) -> tuple[str, str]:
        noise = np.random.default_rng(width).integers(0, 255, (min(height, 9), min(width, 9), 3))
        image = PIL.Image.fromarray(noise.astype(np.uint8)).resize((width, height))
        batch: Any = [[image]] if self.family in ("idefics3", "smolvlm") else [image]
        options = {"crop_to_patches": True} if self.family == "internvl" else {}  # as transformers' processor does
        try:
            theirs = self.kind.from_pretrained(folder)(images=batch, return_tensors="np", **options)["pixel_values"]
        except Exception as error:  # transformers raises many kinds
            return "unusable", f"{type(error).__name__}: {str(error)[:120]}"
        try:
            pictures: Any = self.config.open_pictures(folder, "checkpoint")
            ours = pictures.image(image, 1).arrays["pixel_values"].ravel()
        except InputError as refusal:
            return "refused", str(refusal)
        except Exception as crash:  # a fault
            return "differs", f"crash: {type(crash).__name__}: {str(crash)[:120]}"
        wanted = np.asarray(theirs, np.float32).ravel()
        if ours.shape != wanted.shape:
            return "differs", f"{width} x {height}: {len(ours)} and {len(wanted)} values"
        error = np.abs(ours - wanted).max()
        return ("equal", "") if error < 2e-4 * max(1, np.abs(wanted).max()) else ("differs", f"by {error:.3g}")
