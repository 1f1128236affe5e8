from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from vlkv.compression import budgets
from vlkv.compression.observe import Measure, Observation, column_sums, columns, head_mean, rows_mass, split_rows_mass
from vlkv.compression.option_types import Count, Scope
from vlkv.compression.policy import Budgets, Facts, Mask, PerLayer, Policy, Scores, Statistics
from vlkv.masks import first, last, ordinal


class TGVKV(Policy):
    """Vision tokens by the attention of the text after the image, weighted by the importance of each text token.

    From the authors' code. The weight of a text token is the mean attention that it receives from the text tokens after
    the image that can attend to it. The score of a vision token is the weighted sum of the attention that these give to
    it. The budget of a layer is proportional to the attention that the text gives to the image. With scope="all", text
    is preferred within the budget.

    Attributes:
        sinks: with scope="all", the number of first tokens that are always kept; the last token is kept too.
    """

    scope: Scope = "vision"
    sinks: Count = 4
    facts = Facts(capped=True)
    one_scale = False

    def measures(self, obs: Observation) -> dict[str, Measure]:
        return columns("sum")(self, obs) if self.scope == "all" else {}

    def rows(self, obs: Observation) -> Mask:
        """The text after the last vision token, or the last token."""
        return jnp.where(jnp.any(obs.instruction), obs.instruction, last(obs.valid, 1))

    def score(self, obs: Observation) -> Scores:
        rows, most, heads = self.rows(obs), max(1, obs.max_instruction), obs.k.shape[0]
        received = head_mean(rows_mass(obs, rows, most), 1)[0]
        later_rows = jnp.maximum(jnp.sum(rows) - ordinal(rows), 1)  # of each text token, with itself
        weight = jnp.where(rows, received / later_rows, 0.0)
        scores = head_mean(split_rows_mass(obs, weight[None], most, among=rows)[0], heads)
        if self.scope == "vision":
            return scores
        text = head_mean(column_sums(obs), heads) + jnp.max(scores)
        return jnp.where(obs.is_vision, scores, text)

    def protect(self, obs: Observation) -> Mask:
        return first(obs.valid, self.sinks) | last(obs.valid, 1)

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        mass = rows_mass(obs, self.rows(obs), max(1, obs.max_instruction))
        return {"grounding": jnp.sum(jnp.where(obs.is_vision, jnp.mean(mass, axis=0), 0.0))}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        grounding = statistics["grounding"]
        share = jnp.where(jnp.sum(grounding) > 0, grounding, jnp.ones(layers))
        return budgets.apportion(total * share / jnp.sum(share), total, floor=jnp.minimum(1, most), ceiling=most)
