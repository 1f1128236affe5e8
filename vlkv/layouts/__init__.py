"""Layouts by family: from what an image processor returns to where each vision token comes from and lies.

Host side, numpy only. `arrange` of a family gets the batch (names and shapes as transformers' processor of the family
returns them), tokens and mask, and returns an `Arranged`.
"""

from __future__ import annotations

from collections.abc import Callable

from vlkv.config import TEXT_FAMILIES
from vlkv.layouts import eve, internvl, llava, llava_next, qwen2_vl, squares, text
from vlkv.layouts.arranged import Arranged

ARRANGE: dict[str, Callable[..., Arranged]] = {
    **dict.fromkeys(("llava", "llava_llama"), llava.arrange),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "llava_qwen"), llava_next.arrange),
    **dict.fromkeys(("internvl", "internvl_chat"), internvl.arrange),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), qwen2_vl.arrange),
    **dict.fromkeys(("mobilevlm", "qwen"), squares.arrange),
    "eve": eve.arrange,
    **dict.fromkeys(TEXT_FAMILIES, text.arrange),
}

__all__ = ["ARRANGE", "Arranged"]
