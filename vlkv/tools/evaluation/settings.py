"""How questions are answered."""

from __future__ import annotations

import dataclasses

from vlkv.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How questions are answered.

    Attributes:
        max_new_tokens: limit on the tokens of an answer. Answers are greedy.
        batch: number of prompts that are prefilled together.
        query_agnostic: the policy sees only the prompt before the question; question and answer prefix are added with
            `extend`.
        perplexity: also compute the log-probability of the first accepted answer.
        temperature: if positive, two more answers are drawn with the full cache at this temperature (`self-rouge-l`).
        frames: limit on the frames of a video.
        seed: for random policies and drawn answers.
    """

    max_new_tokens: int = 64
    batch: int = 1
    query_agnostic: bool = False
    perplexity: bool = False
    temperature: float = 0.0
    frames: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("batch", 1), ("temperature", 0), ("frames", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)} must be at least {least}")
