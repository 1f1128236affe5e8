"""The demo model: a small LLaVA that reads pages of handwritten digits.

`pages` makes pages, questions and answers, and `folder` writes a Hugging Face folder. benchmarks/train_mini.py trains
the weights in `CHECKPOINT`.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
PAGE = Path(__file__).parent / "page.png"  # an example that was not used in training
QUESTION = "what does row two say?"

__all__ = ["CHECKPOINT", "PAGE", "QUESTION"]
