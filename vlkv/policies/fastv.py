from __future__ import annotations

from jaxtyping import Array, Float

from vlkv.compression.observe import Observation, head_mean, rows_mass
from vlkv.compression.option_types import Positive
from vlkv.compression.policy import Mask
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import last


class FastV(ReducingPolicy):
    """Keeps the vision tokens that the last token attends to most after `layer` layers (Chen et al. 2024, Sec. 4).

    Later layers hardly use the others. The attention is that of the last layer that ran, averaged over heads. The first
    `layer` layers cache the whole image.

    Attributes:
        layer: K, number of layers that process all tokens.
    """

    layer: Positive = 2

    def reductions(self, layers: int) -> tuple[int, ...]:
        return (self.layer,)

    def ranking(self, obs: Observation) -> Float[Array, "1 T"]:
        return head_mean(rows_mass(obs, last(obs.valid, 1), 1), 1)

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        assert obs is not None
        return self.best(self.ranking(obs)[0], vision)
