"""Qwen-VL's pictures, resized to one square whatever their shape, and its two ways to write a prompt."""

from __future__ import annotations

from pathlib import Path

from vlkv.config import ModelConfig, QwenVitConfig
from vlkv.errors import InputError
from vlkv.files import read_json
from vlkv.processing.llava import LlavaPictures
from vlkv.processing.pixels import Layout, PixelSettings
from vlkv.processing.templates import ChatTemplate

# The picture's token between its marks; the processor repeats it once for every vision token.
_CONTENT = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for item in message.content %}"
    "{% if item.type == 'image' %}{% set count.pictures = count.pictures + 1 %}"
    "Picture {{ count.pictures }}: <img><imgpad></img>{{ '\\n' }}"
    "{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}"
)
_RAW = f"{{% set count = namespace(pictures=0) %}}{{% for message in messages %}}{_CONTENT}{{% endfor %}}"
_CHAT = (
    "{% set count = namespace(pictures=0) %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    f"{_CONTENT}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_FORMATS = {"raw": _RAW, "chatml": _CHAT}


def from_folder(folder: Path, config: ModelConfig, layout: Layout) -> LlavaPictures:
    """The authors' code has no settings but the size; raises InputError for a layout that the model does not know."""
    assert isinstance(config.vision, QwenVitConfig)
    if layout != "checkpoint":
        raise InputError(f"layout={layout!r} is not for this model, which resizes every picture to a square")
    side = config.vision.image_size
    raw = {"size": {"height": side, "width": side}, "do_center_crop": False}
    settings = PixelSettings.from_hf(raw, str(folder), layout)
    return LlavaPictures(settings=settings, side=side, tokens=config.vision.tokens)


def template(folder: Path) -> ChatTemplate:
    """What the folder's `generation_config.json` names: the bare text, or ChatML.

    Raises:
        InputError: it names another.
    """
    path = folder / "generation_config.json"
    name = (read_json(path) or {}).get("chat_format", "raw")
    if name not in _FORMATS:
        raise InputError(f"{path}: chat_format={name!r} is not supported (only {', '.join(_FORMATS)})")
    return ChatTemplate.from_text(_FORMATS[name], f"{path}: chat_format={name!r}")
