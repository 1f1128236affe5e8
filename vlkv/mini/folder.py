"""Writes a trained demo model as a Hugging Face folder, which transformers can load too.

All files except the weights and the log of the training are those of the shipped folder, `CHECKPOINT`.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from checkpoints_convert.entry import make_entries
from vlkv import sharding
from vlkv.config import ModelConfig
from vlkv.families import Model
from vlkv.families.folders import read_config, read_raw, table_of
from vlkv.files import replacing_folder, write_json
from vlkv.mini import CHECKPOINT

EOS, IMAGE = 2, 4  # ids of </s> and <image>
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
)


def config() -> ModelConfig:
    """The config of the demo model."""
    return read_config(CHECKPOINT)


def tokenizer() -> Tokenizer:
    """The tokenizer: one token per word, digit or punctuation mark, ignoring case. Texts begin with <s>."""
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def write(folder: Path, params: Model, log: dict[str, Any]) -> None:
    """Writes the weights and `training_log.json` as a folder, which replaces an earlier one when it is complete."""
    with replacing_folder(folder) as fresh:
        for name in _SETTINGS:
            shutil.copyfile(CHECKPOINT / name, fresh / name)
        write_json(fresh / "training_log.json", log)
        save_file(tensors(params), fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "model.safetensors").chmod(0o644)  # safetensors makes the file readable only for its owner


def tensors(params: Model) -> dict[str, np.ndarray]:
    """The weights, with the names and shapes of the Hugging Face checkpoint."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    weights = {sharding.path_name(path): np.asarray(leaf, np.float32) for path, leaf in leaves}
    raw = read_raw(CHECKPOINT)
    table = table_of(params.config, raw)
    entries = make_entries(table.names, table.shapes())
    used = {entry.key: weights[entry.path].reshape(entry.shape) for entry in entries if entry.path in weights}
    return used | _unused(raw["vision_config"])


def _unused(c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Zeros for the tower's last layer and last norm, which are not used but which transformers requires."""
    d, f = c["hidden_size"], c["intermediate_size"]
    layer = f"encoder.layers.{c['num_hidden_layers'] - 1}."
    shapes: dict[str, tuple[int, ...]] = {f"{layer}self_attn.{name}_proj": (d, d) for name in ("q", "k", "v", "out")}
    shapes |= {f"{layer}mlp.fc1": (f, d), f"{layer}mlp.fc2": (d, f)}
    shapes |= {name: (d,) for name in ("post_layernorm", f"{layer}layer_norm1", f"{layer}layer_norm2")}
    zeros = {}
    for name, shape in shapes.items():
        zeros[f"model.vision_tower.{name}.weight"] = np.zeros(shape, np.float32)
        zeros[f"model.vision_tower.{name}.bias"] = np.zeros(shape[:1], np.float32)
    return zeros
