"""Large vision-language models in JAX with a compressed key-value cache.

Names are imported when they are first asked for, so that code that needs none of them does not load jax.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

# Module -> its public names.
_PUBLIC = {
    "buckets": ("Buckets",),
    "cache": ("PackedCache",),
    "errors": ("InputError",),
    "extend": ("extend",),
    "families": ("init", "presets"),
    "generate": ("Output", "decode", "decode_step", "forward", "generate", "log_probabilities", "score", "stream"),
    "inputs": ("Inputs",),
    "loading": ("load", "load_params", "load_processor"),
    "prefill": ("fill_cache", "prefill"),
    "reading": ("Prompt", "read_prompt"),
    "sampling": ("Greedy", "Sample"),
    "saving": ("load_cache", "save_cache"),
}
_MODULES = ("cache", "policies", "sampling")
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted([*_HOME, *_MODULES])  # noqa: PLE0605 (a list of strings)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"vlkv.{_HOME[name]}"), name)
    if name.startswith("_") or importlib.util.find_spec(f"vlkv.{name}") is None:
        raise AttributeError(f"module 'vlkv' has no attribute {name!r}")
    return importlib.import_module(f"vlkv.{name}")


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Some functions have the name of their module, which importing the module must not hide."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOME.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
