"""The demo model with fewer layers and a smaller image: its answers mean nothing, but it compiles much faster."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

from vlkv.mini import CHECKPOINT


def cut(folder: Path, *, layers: int, grid: int) -> Path:
    """Writes a checkpoint with the first layers of decoder and tower, for images of `grid` x `grid` patches."""
    shutil.copytree(CHECKPOINT, folder)
    raw = json.loads((folder / "config.json").read_text())
    vision, patches = raw["vision_config"], grid**2
    before, vision["image_size"] = vision["image_size"], grid * vision["patch_size"]
    raw["text_config"]["num_hidden_layers"], vision["num_hidden_layers"] = layers, 2
    raw["image_seq_length"] = patches
    (folder / "config.json").write_text(json.dumps(raw))
    for path in folder.glob("*processor_config.json"):
        path.write_text(re.sub(rf"\b{before}\b", str(vision["image_size"]), path.read_text()))

    def is_kept(name: str) -> bool:
        number = re.search(r"layers\.(\d+)\.", name)
        return number is None or int(number[1]) < (2 if "vision" in name else layers)

    tensors = {name: x for name, x in load_file(folder / "model.safetensors").items() if is_kept(name)}
    for name in tensors:
        if name.endswith("position_embedding.weight"):  # the first is that of the class token
            tensors[name] = tensors[name][: patches + 1].copy()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
