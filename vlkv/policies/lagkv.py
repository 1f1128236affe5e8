from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.compression.observe import Observation
from vlkv.compression.option_types import Count, Range
from vlkv.compression.policy import Facts, Policy, Scores
from vlkv.masks import ordinal, tokens_of


class LagKV(Policy):
    """How much keys and values vary between channels, relative to the tokens that follow (Liang et al. 2025, Sec. 3).

    After the sinks, the prompt is divided into parts of `lag` tokens. Each channel of a part is scaled to the range of
    the channel in the next part, and a token's score follows from the deviation of its channels. By default, tokens are
    ranked within their part, so that every part keeps the same share. The sinks, the last complete part and what
    follows it have the highest scores. In a prompt of fewer than two parts, later tokens have higher scores.

    Attributes:
        sinks: number of first tokens with the highest score.
        lag: number of tokens of a part.
        one_order: tokens of all parts are ranked in one order, by their scores.
    """

    sinks: Count = 4
    lag: Annotated[int, Range(2)] = 128
    one_order: bool = False
    facts = Facts(observes=False)

    def score(self, obs: Observation) -> Scores:
        (heads, length, _), place = obs.k.shape, ordinal(obs.valid)
        count, parts = jnp.sum(obs.valid), (length - self.sinks) // self.lag
        later = (place - self.sinks) / jnp.maximum(count - self.sinks, 1)
        few = jnp.broadcast_to(jnp.where(place < self.sinks, 1.0, later), (heads, length))
        if parts < 2:
            return few
        token = jnp.maximum(tokens_of(obs.valid), 0)[self.sinks : self.sinks + parts * self.lag]
        scores = sum(self.spread(x[:, token].astype(jnp.float32)) for x in (obs.k, obs.v)) / 2
        if not self.one_order:
            scores = jnp.argsort(jnp.argsort(scores, axis=-1), axis=-1) / self.lag
        # Parts that do not exist, or that nothing follows, have the highest score.
        exists = jnp.arange(parts - 1)[:, None] + 1 < (count - self.sinks) // self.lag
        scores = jnp.where(exists, scores, 1.0).reshape(heads, -1)
        index = place - self.sinks
        inside = (index >= 0) & (index < scores.shape[1])
        scores = jnp.where(inside, scores[:, jnp.clip(index, 0, scores.shape[1] - 1)], 1.0)
        return jnp.where(count < self.sinks + 2 * self.lag, few, scores)

    def spread(self, x: Float[Array, "K T H"]) -> Float[Array, "K parts lag"]:
        """The deviation over the channels, relative to the next part, as shares of a part; without the last part."""
        parts = x.reshape(len(x), -1, self.lag, x.shape[-1])
        low, high = (f(parts[:, 1:], axis=2, keepdims=True) for f in (jnp.min, jnp.max))
        scaled = (parts[:, :-1] - low) / jnp.where(high > low, high - low, 1.0)
        return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)
