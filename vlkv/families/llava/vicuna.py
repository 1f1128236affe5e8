"""Prompts in Vicuna's format."""

from __future__ import annotations

from vlkv.families.llava.config import LLAVA_KINDS
from vlkv.processing.squares import SquareConfig

_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    "{% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} "
    "{% else %}ASSISTANT: {{ message.content }}</s>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


class VicunaConfig(SquareConfig):
    """Prompts in Vicuna's format, version 1.1, unless the folder has a chat template."""

    kinds = LLAVA_KINDS
    prompt_format = _VICUNA
