from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import matching
from vlkv.compression.option_types import Range
from vlkv.compression.policy import Mask
from vlkv.policies.tome import ToMe

_Cosine = Annotated[float, Range(-1, 1)]


class PiToMe(ToMe):
    """ToMe among the 2r tokens of the highest energy; the others are protected (Tran et al. 2024, Sec. 3).

    The energy of a token is the mean of elu(cosine - margin) over all mergeable vision tokens. In the order of falling
    energy, all tokens at even indices (A) are merged into the most similar token at an odd index (B).

    Attributes:
        margin: cosine from which similarity counts in full; one for all stages or one per stage. None: it falls
            linearly over the stages, 0.9 (1 - (s + 1) / (S + 1)); in the paper it falls over the layers.
    """

    margin: _Cosine | tuple[_Cosine, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            "margin", len(self.margins) == self.stage_count, "must have one number for each stage, or one for all"
        )

    @property
    def margins(self) -> tuple[float, ...]:
        if isinstance(self.margin, tuple):
            return self.margin
        stages = self.stage_count
        if self.margin is None:
            return tuple(0.9 * (1 - (stage + 1) / (stages + 1)) for stage in range(stages))
        return (self.margin,) * stages

    def match(
        self, metric: Float[Array, "T H"], members: Mask, removed: Int[Array, ""], *, stage: int
    ) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """Ranks the 2 x `removed` members of the highest energy; matches those at even ranks with those at odd ones.

        Returns the targets and the ranks in the order of merging, as `ToMe.match`.
        """
        energy = matching.energy(metric, members, self.margins[stage])
        group = jnp.where(members, 0, 1)
        rank = matching.rank_within(group, -energy)
        candidates = members & (rank < 2 * removed)
        target, _ = matching.closest(metric, candidates & (rank % 2 == 1), group)
        return target, jnp.where(candidates & (rank % 2 == 0), rank // 2, members.shape[0])
