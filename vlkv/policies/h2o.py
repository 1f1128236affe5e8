"""H2O: heavy hitters, the tokens that have received most attention so far, and a recent window."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float

from vlkv.observe import Observation, column_sums, group_mean, last
from vlkv.policies.policy import Policy, policy


@policy
class H2O(Policy):
    """Accumulated attention per head, half of the budget for the most recent tokens (Zhang et al. 2023, Sec. 4.1).

    Attributes:
        recent: tokens kept as recent; None: half of the mean budget of a layer.
    """

    recent: int | None = None
    paper = "Zhang et al. 2023, H2O: Heavy-Hitter Oracle for Efficient Generative Inference"
    equations = "Def. 4.1, Alg. 1"

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = self.recent is None or (isinstance(self.recent, int) and self.recent >= 0)
        self.check("recent", valid, "must be a whole number of at least 0, or None")

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Column sums of the causal attention, averaged over the query heads of each key head."""
        return group_mean(column_sums(obs), obs.k.shape[0])

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """The recent half."""
        return last(obs.valid, obs.mean_budget // 2 if self.recent is None else self.recent)
