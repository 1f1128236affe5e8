"""Reads `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config import Raw

# Fields of `generation_config.json` that change answers in transformers -> the default. Others are about stop tokens,
# padding, outputs and caches, or matter only together with one of these.
GENERATION: Raw = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "min_new_tokens": 0,
    "forced_eos_token_id": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "max_new_tokens": None,
    "min_p": None, "top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "penalty_alpha": None, "dola_layers": None,
    "max_length": 20, "min_length": 0, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0,
    "sequence_bias": None, "forced_bos_token_id": None, "exponential_decay_length_penalty": None,
    "renormalize_logits": False, "remove_invalid_values": False, "guidance_scale": 1.0, "watermarking_config": None,
    "stop_strings": None, "max_time": None, "token_healing": False, "constraints": None, "force_words_ids": None,
}  # fmt: skip


def read_generation(raw: Raw) -> tuple[tuple[str, Any], ...]:
    """The fields of `GENERATION` that are neither null nor the default, with tuples in place of lists."""
    fields = {name: _hashable(raw[name]) for name in GENERATION if raw.get(name) is not None}
    return tuple((name, value) for name, value in fields.items() if value != GENERATION[name])


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _hashable(one)) for name, one in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
