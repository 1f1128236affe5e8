"""The model `vlkv` of lmms-eval, which finds it by the entry point `vlkv = "vlkv.harness:manifest"`.

python -m lmms_eval --model vlkv --model_args pretrained=DIR,policy=aircache,keep=0.1 --batch_size 4 --tasks docvqa_val
"""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """What lmms-eval's registry asks for (group `lmms_eval.models`); it imports the model when that is chosen."""
    from lmms_eval.models.registry_v2 import ModelManifest  # noqa: PLC0415 (lmms-eval calls; nobody else needs it)

    return ModelManifest(model_id="vlkv", simple_class_path="vlkv.harness.lmms.Vlkv")
