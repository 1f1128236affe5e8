"""Puts vision embeddings where the prompt has vision tokens. After this nothing knows what an image is."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def splice(
    x: Float[Array, "B T D"], vision: Float[Array, "V D"], vision_index: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Row `vision_index` of the batch's flat vision embeddings where it is >= 0, the token's own elsewhere."""
    return jnp.where(vision_index[..., None] >= 0, vision[jnp.maximum(vision_index, 0)].astype(x.dtype), x)
