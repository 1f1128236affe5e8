"""Pictures and conversation of LLaVA-1.5 and MobileVLM-V2 as their authors publish them.

Both use the tower's own image processor, behind a padding to a square where the config says so, and Vicuna's
conversation; the checkpoints carry neither as a file.
"""

from __future__ import annotations

from pathlib import Path

from vlkv.config import ClipConfig, ModelConfig
from vlkv.processing.llava import LlavaPictures
from vlkv.processing.pixels import Layout, PixelSettings, read_settings
from vlkv.processing.templates import ChatTemplate

_SETTINGS = ("processor_config.json", "preprocessor_config.json")
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_VICUNA = (
    f"{_SYSTEM} "
    "{% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} "
    "{% else %}ASSISTANT: {{ message.content }}</s>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def from_folder(folder: Path, config: ModelConfig, layout: Layout) -> LlavaPictures:
    """The settings of the folder, else of the tower's folder in it, else CLIP's own at the tower's size.

    Raises:
        InputError: settings that we do not honour.
    """
    assert isinstance(config.vision, ClipConfig)
    wiring, side = config.wiring, config.vision.image_size
    if wiring.pad:
        layout = "pad"
    for place in (folder, folder / wiring.tower):
        if any((place / name).is_file() for name in _SETTINGS):
            settings = read_settings(place, layout)
            break
    else:
        settings = PixelSettings.from_hf({"size": side, "crop_size": side}, str(folder), layout)
    first = int(config.vision.keep_class_token)
    return LlavaPictures(settings=settings, side=side, tokens=wiring.side**2 + first)


def template(folder: Path) -> ChatTemplate:
    """Vicuna's conversation, version 1.1, as both repositories write it."""
    del folder
    return ChatTemplate.from_text(_VICUNA, "Vicuna's conversation")
