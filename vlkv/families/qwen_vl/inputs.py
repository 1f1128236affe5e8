"""Qwen-VL's images, all resized to one square, and its two prompt formats.

Every image becomes a square of vision tokens: the resampler's queries, which have positions on a square.
"""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from vlkv.errors import InputError
from vlkv.files import read_json
from vlkv.processing.pictures import Pictures
from vlkv.processing.pixels import Layout, PixelSettings
from vlkv.processing.squares import SquareConfig
from vlkv.processing.templates import ChatTemplate

# The image token between its marks. The processor repeats it once per vision token.
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


class QueriesConfig(SquareConfig):
    """Images as squares of `vision.side` x `vision.side` tokens."""

    @property
    @override
    def side(self) -> int:
        return self.vision.side

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        self.check_layout(layout)
        size = self.vision.image_size
        raw = {"size": {"height": size, "width": size}, "do_center_crop": False}
        return self.squares(PixelSettings.from_hf(raw, str(folder)))

    def template(self, folder: Path) -> ChatTemplate:
        """The folder's template, or the one that `generation_config.json` names: plain text, or ChatML.

        Raises:
            InputError: it names another format.
        """
        found = ChatTemplate.from_folder(folder)
        if found is not None:
            return found
        path = folder / "generation_config.json"
        name = (read_json(path) or {}).get("chat_format", "raw")
        if name not in list(_FORMATS):  # a list, because the value may be of a type that cannot be hashed
            raise InputError(f"{path}: chat_format={name!r} is not supported (only {', '.join(_FORMATS)})")
        return ChatTemplate.from_text(_FORMATS[name], f"{path}: chat_format={name!r}")
