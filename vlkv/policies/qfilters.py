from __future__ import annotations

import jax.numpy as jnp

from vlkv.compression.observe import Observation
from vlkv.compression.policy import Policy, Scores


class QFilters(Policy):
    """Projections of the keys on the direction that the queries of their head share (Godey et al. 2025, Sec. 3).

    The direction is the first right singular vector of the prompt's rotated queries, with the sign for which their mean
    projection is positive. Query heads that share a key head are averaged. No attention is computed.
    """

    def score(self, obs: Observation) -> Scores:
        """A filter is an eigenvector of the sum of q q^T, so the queries are read once and no [T, T] matrix is made."""
        seen = (obs.valid & obs.observers)[:, None]
        q = jnp.where(seen, obs.q.astype(jnp.float32), 0.0)
        axis = jnp.linalg.eigh(jnp.einsum("nti,ntj->nij", q, q, precision="highest"))[1][..., -1]
        mean = jnp.einsum("nti,ni->n", q, axis, precision="highest")
        filters = jnp.where(mean[:, None] < 0, -axis, axis).reshape(len(obs.k), -1, axis.shape[-1]).mean(axis=1)
        k = jnp.where(obs.valid[:, None], obs.k.astype(jnp.float32), 0.0)
        return jnp.einsum("kth,kh->kt", k, filters, precision="highest")
