"""The attention of single prompt tokens, the observers, to the image, and how similar it is (AirCache, Fig. 1).

Axes: R observers · V vision tokens · T prompt · N, K heads · H head dim.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.sharding.ops import attention_mass


def observer_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    valid: Bool[Array, " T"],
    observers: Int[Array | np.ndarray, " R"],
    vision: Int[Array | np.ndarray, " V"],
    until: Int[Array, " T"] | None = None,
) -> Float[Array, "R V"]:
    """Attention of each observer to each vision token, mean over heads. The softmax is over the whole prompt.

    Args:
        q: queries of one row and layer.
        k: keys of the same row and layer.
        valid: False for padding.
        observers: indices of prompt tokens.
        vision: indices of the vision tokens.
        until: index of the last token that each token attends to; None: itself.
    """
    rows = jnp.zeros((len(observers), q.shape[0])).at[jnp.arange(len(observers)), jnp.asarray(observers)].set(1.0)
    q, k = jnp.swapaxes(q, 0, 1), jnp.swapaxes(k, 0, 1)
    mass = attention_mass(q, k, row_weight=rows, key_mask=valid, row_place=until)
    return jnp.mean(mass, axis=1)[:, jnp.asarray(vision)]


def consistency(rows: Float[np.ndarray, "R V"]) -> float:
    """Mean cosine similarity of all pairs of rows: 1 if all observers attend to the same; NaN for one observer."""
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.maximum(length, 1e-30)
    count = len(rows)
    return float("nan") if count < 2 else float((unit @ unit.T).sum() - (unit**2).sum()) / (count * (count - 1))
