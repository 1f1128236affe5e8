"""The demo model: a small LLaVA that reads pages of handwritten digits.

`pages` makes pages, questions and answers; `folder` writes a Hugging Face folder; `training` trains the
weights in `CHECKPOINT` (benchmarks/train_mini.py). Using them needs `pages` alone, and no scikit-learn.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
PAGE = Path(__file__).parent / "page.png"  # a page that the model has not seen, for examples
QUESTION = "what does row two say?"

__all__ = ["CHECKPOINT", "PAGE", "QUESTION"]
