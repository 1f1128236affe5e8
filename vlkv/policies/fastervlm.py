from __future__ import annotations

from vlkv.compression.policy import Mask, Observation
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens


class FasterVLM(ReducingPolicy):
    """Keeps the vision tokens that the class token attends to most, averaged over heads (Zhang et al. 2024).

    The attention is that of the last block of the tower that runs; in a tower without a class token, the mean attention
    that a patch receives. All images of a row share one budget.
    """

    class_attention_layers = (-1,)  # the last block that runs

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        return self.best(tokens.tower_attention[-1], vision)
