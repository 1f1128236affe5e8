"""Llama, Mistral, Qwen2, Phi-3 and InternLM2 without a tower."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoints_convert.tables.decoder import decoder
from checkpoints_convert.tables.entry import Entry
from vlkv.config import ModelConfig

RENAMES = ((r"^output\.", "lm_head."),)  # InternLM2


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    yield from decoder(config.decoder, "model.")


def ignored(key: str, config: ModelConfig) -> bool:
    """Nothing."""
    del key, config
    return False
