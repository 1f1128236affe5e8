"""The model `vlkv` for lmms-eval, which finds it by the entry point `vlkv = "vlkv.tools.harness:manifest"`.

python -m lmms_eval --model vlkv --model_args pretrained=DIR,policy=aircache,keep=0.1 --batch_size 4 --tasks docvqa_val
"""

from typing import Any


def manifest() -> Any:
    """Tells the registry of lmms-eval where the model class is. The class is imported only when the model is used."""
    from lmms_eval.models.registry_v2 import ModelManifest  # noqa: PLC0415 (only lmms-eval calls this)

    return ModelManifest(model_id="vlkv", simple_class_path="vlkv.tools.harness.lmms.Vlkv")
