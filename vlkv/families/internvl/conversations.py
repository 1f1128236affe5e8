"""Prompt formats of the original InternVL checkpoints, which ship them as Python code and not as a chat template.

Source: `internvl_chat/internvl/conversation.py` of the authors' repository. One known difference: InternVL-Chat-V1.5
was published with InternLM's system message under the name `internlm2-chat`; that repository, and we, use InternVL2's.
"""
# ruff: noqa: RUF001 (the system messages are Chinese)

from __future__ import annotations

import dataclasses

_INTERNVL2 = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"
)
_INTERNVL2_5 = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """The text that opens each turn, and the text that ends it."""

    system: str  # the whole system turn, without the separator
    user: str
    assistant: str
    separator: str  # contains the special token that ends an answer


def _chatml(message: str, separator: str) -> Conversation:
    return Conversation(
        system=f"<|im_start|>system\n{message}",
        user="<|im_start|>user\n",
        assistant="<|im_start|>assistant\n",
        separator=separator,
    )


CONVERSATIONS = {
    "internlm2-chat": _chatml(_INTERNVL2, "<|im_end|>"),
    "Hermes-2": _chatml(_INTERNVL2, "<|im_end|>"),
    "phi3-chat": Conversation(
        system=f"<|system|>\n{_INTERNVL2}", user="<|user|>\n", assistant="<|assistant|>\n", separator="<|end|>"
    ),
    "internvl2_5": _chatml(_INTERNVL2_5, "<|im_end|>\n"),
}
