from __future__ import annotations

from vlkv.compression.observe import Observation, head_mean, rows_mass
from vlkv.compression.policy import Mask
from vlkv.compression.reducing import StagedPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import last


class PyramidDrop(StagedPolicy):
    """After each of several layers, keeps the vision tokens that the last token attends to most (Xing et al. 2024).

    Every stage keeps the same share of the image, so that `keep` is left after the last one: keep=0.125 is the paper's
    lambda = 1/2 after 8, 16 and 24 of 32 layers.

    Attributes:
        layers: numbers of layers before the stages; None: a quarter, half and three quarters of the model.
    """

    def after(self, layers: int) -> tuple[int, ...]:
        return tuple(max(i + 1, n * layers // 4) for i, n in enumerate((1, 2, 3)))

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        assert obs is not None
        ranking = head_mean(rows_mass(obs, last(obs.valid, 1), 1), 1)[0]
        return self.best(ranking, vision, self.share)
