"""A policy that leaves a single vision token per layer and head, at one place of another method's ranking.

AirCache's Figs. 3 (b), 4 and 5 measure the answers with it (Sec. 4.3). Use it as any policy of your own:

    vlkv eval DATA.jsonl --model MODEL --policy "benchmarks.papers.one_token:OneToken(method='h2o', place=1)" --out OUT
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression.option_types import Count, Share
from vlkv.policies import Facts, Observation, Policy, Scope, make


class OneToken(Policy):
    """Keeps all text and one vision token."""

    method: str = "aircache"  # the text of the method that ranks
    place: Count = 1  # of the token in the ranking: 1 is the best; 0: no token at all
    share: Share | None = None  # instead, the place as a share of the image's tokens, rounded down, at least the first
    budget: int | None = 1
    scope: Scope = "vision"
    facts = Facts(paper="Huang et al. 2025, AirCache", equations="Sec. 4.3", stages="score, allocate, rank")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("budget", self.budget == 1 and self.scope == "vision", 'must be 1, with scope="vision"')

    @property
    def ranking(self) -> Policy:
        return make(self.method, budget=1, scope="vision")

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        return self.ranking.score(obs)

    def allocate(
        self, statistics: Any, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, " L"]:
        """One token per layer, or none."""
        del statistics, total, layers
        return jnp.minimum(most, 0 if self.place == 0 else 1)

    def rank(
        self, scores: Float[Array, "K T"], statistics: Any, candidates: Bool[Array, " T"], count: Int[Array, " K"]
    ) -> tuple[Float[Array, "K T"], Int[Array, " K"]]:
        """The token at the place; if there are fewer tokens, the last."""
        del statistics
        tokens = jnp.sum(candidates)
        place = jnp.asarray(self.place) if self.share is None else jnp.floor(self.share * tokens)
        order = jnp.argsort(jnp.where(candidates, -scores, jnp.inf), axis=-1, stable=True)
        place_of = jnp.argsort(order, axis=-1) + 1
        return (place_of == jnp.clip(place, 1, jnp.maximum(tokens, 1))).astype(jnp.float32), count
