"""PyramidDrop: removes vision tokens with little attention in several stages of the decoder."""

from __future__ import annotations

from jaxtyping import Array, Bool

from vlkv.compression import budgets
from vlkv.compression.observe import Observation, head_mean, rows_mass
from vlkv.compression.option_types import Positive
from vlkv.compression.policy import Facts
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import last


class PyramidDrop(ReducingPolicy):
    """After each of several layers, keeps the vision tokens that the last token attends to most (Xing et al. 2024).

    Every stage keeps the same share lambda of the image, so that `keep` is left after the last one. The paper has
    lambda = 1/2 after 8, 16 and 24 of 32 layers, which is keep=0.125. The published code multiplies the last token's
    query and the keys of the layer after the stage; here the attention of the layer before it is used, as in FastV.

    Attributes:
        layers: numbers of layers before the stages; None: a quarter, half and three quarters of the model.
    """

    layers: tuple[Positive, ...] | None = None
    facts = Facts(
        paper="Xing et al. 2024, PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual"
        " Redundancy Reduction",
        equations="Sec. 3.2",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("layers", self.layers != (), "must have at least one number")

    def reductions(self, layers: int) -> tuple[int, ...]:
        """`layers`, or the default."""
        return (layers // 4, layers // 2, 3 * layers // 4) if self.layers is None else self.layers

    @property
    def share(self) -> float:
        """Lambda, the fraction of its vision tokens that each stage keeps."""
        return self.last_keep ** (1 / (3 if self.layers is None else len(self.layers)))

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """Lambda times `vision`, rounded half up."""
        del stage, images
        return int(budgets.fraction(self.share, vision)[-1])

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
        """Keeps text and the best vision tokens."""
        del stage
        assert obs is not None
        ranking = head_mean(rows_mass(obs, last(obs.valid, 1), 1), 1)[0]
        return tokens, self.kept(tokens, ranking, self.share)
