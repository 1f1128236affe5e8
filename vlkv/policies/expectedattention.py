from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.compression.observe import Observation, group_mean
from vlkv.compression.option_types import Count, Magnitude, Positive
from vlkv.compression.policy import Mask, Policy, Scores
from vlkv.compression.rotation import mean_rotation, rotated, unrotated
from vlkv.masks import first


class ExpectedAttention(Policy):
    """The mean attention of Gaussian queries at the next positions, times the norm of the value (Devoto et al. 2025).

    The queries have the mean and the covariance of the prompt's queries before rotation, rotated by the mean rotation
    of the next `ahead` positions. The expectation of exp(q k / sqrt(H)) has a closed form; no attention is computed.

    Attributes:
        ahead: number of future positions over which the rotation is averaged.
        sinks: number of first tokens that are kept with scope="all", and whose queries are not counted.
        covariance: False: only the mean of the queries is used.
        value_norm: whether the expected attention is multiplied by the norm of the value.
        epsilon: added to the expected attention before the multiplication.
    """

    ahead: Positive = 512
    sinks: Count = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: Magnitude = 0.0
    uses = ("rotation",)

    def protect(self, obs: Observation) -> Mask:
        return first(obs.valid, self.sinks)

    def score(self, obs: Observation) -> Scores:
        """Expected attention, with a softmax over the tokens after the sinks.

        With scope="vision", sinks that are vision tokens compete like others. Their attention is relative to the same
        sum, which does not contain them, and so it is limited to 1.
        """
        counted = obs.valid & ~first(obs.valid, self.sinks)
        mean, covariance = self.future_queries(obs, counted & obs.observers)
        kv_heads, _, head_dim = obs.k.shape
        k = obs.k.astype(jnp.float32)

        def logits(mean: Float[Array, "G H"], covariance: Float[Array, "G H H"], k: Float[Array, "T H"]) -> Array:
            first_order = jnp.einsum("gh,th->gt", mean, k, precision="highest") / head_dim**0.5
            if not self.covariance:
                return first_order
            spread = jnp.einsum("gij,tj->gti", covariance, k, precision="highest")
            return first_order + jnp.einsum("gti,ti->gt", spread, k, precision="highest") / (2 * head_dim)

        mean, covariance = (x.reshape(kv_heads, -1, *x.shape[1:]) for x in (mean, covariance))
        expected = jax.vmap(logits)(mean, covariance, k).reshape(len(obs.q), -1)
        total = jax.nn.logsumexp(expected, axis=-1, where=counted, keepdims=True)
        attention = jnp.exp(jnp.minimum(expected - total, 0.0))
        scores = group_mean(jnp.where(obs.valid, attention, 0.0), kv_heads)
        if self.value_norm:
            scores = (scores + self.epsilon) * jnp.linalg.norm(obs.v.astype(jnp.float32), axis=-1)
        return jnp.where(obs.valid, scores, 0.0)

    def future_queries(self, obs: Observation, counted: Mask) -> tuple[Float[Array, "N H"], Float[Array, "N H H"]]:
        """Mean and covariance of the counted queries, rotated to the next positions; without covariance, zeros."""
        context = obs.context
        assert context is not None
        q = jnp.where(counted[:, None], unrotated(obs.q, context), 0.0)
        count = jnp.maximum(jnp.sum(counted), 1)
        mean = jnp.sum(q, axis=1) / count
        future = mean_rotation(context, obs.valid, self.ahead, q.shape[-1])
        if not self.covariance:
            return rotated(mean, future, context), jnp.zeros((*mean.shape, mean.shape[1]))
        centred = rotated(jnp.where(counted[:, None], q - mean[:, None], 0.0), future, context)
        covariance = jnp.einsum("nti,ntj->nij", centred, centred, precision="highest") / count
        return rotated(mean, future, context), covariance
