"""FastV: after the second layer half of the image is hardly looked at, so it goes."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float

from vlkv.observe import Observation, head_mean, last, rows_mass, top
from vlkv.policies.policy import policy
from vlkv.policies.reducing import ReducingPolicy
from vlkv.tokens import Tokens


@policy
class FastV(ReducingPolicy):
    """Keeps the vision tokens that the last token attends to most after `layer` layers (Chen et al. 2024, Sec. 4).

    The attention is head-mean and of the layer just run; text always stays, and so does the order of what is left.
    Caches of the layers before hold the whole image. The published code agrees; its cached path reuses the entries
    of one layer for all later ones, which is not done here.

    Attributes:
        layer: K, how many layers see everything.
    """

    layer: int = 2
    shortens_by = "layer"
    paper = "Chen et al. 2024, An Image is Worth 1/2 Tokens After Layer 2: FastV"
    equations = "Sec. 4"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("layer", self.layer >= 1, "must be at least 1: it ranks by a layer's attention")

    def reductions(self, layers: int) -> tuple[int, ...]:
        """One."""
        return (self.layer,)

    def ranking(self, obs: Observation) -> Float[Array, "1 T"]:
        """Head-mean attention row of the last token."""
        return head_mean(rows_mass(obs, last(obs.valid, 1), 1), 1)

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
        """The best of the image."""
        del stage
        assert obs is not None
        vision = tokens.valid & tokens.is_vision
        return tokens, (tokens.valid & ~tokens.is_vision) | top(self.ranking(obs), vision, self.count(vision)[None])[0]
