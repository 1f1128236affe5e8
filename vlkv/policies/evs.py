from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from typing_extensions import override

from vlkv.compression import budgets
from vlkv.compression.policy import Mask, Observation
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens, one_frame_before
from vlkv.masks import evenly, top


class EVS(ReducingPolicy):
    """Keeps the first frame, and patches that differ most from the same patch one frame before (Bagrov et al. 2025).

    The difference is 1 - cosine of the embeddings, including the features that the model adds after its first layers
    (Qwen3-VL). `keep` is 1 - q of vLLM, which contains the method; the number of tokens is rounded down. All videos of
    a row share one budget. Only frames of the same video are compared, and an image is a first frame.
    """

    @override
    def count(self, vision: Mask, share: float | None = None) -> Int[Array, ""]:
        """`keep` times the number of these vision tokens, rounded down, at least one."""
        assert share is None
        return jnp.maximum(budgets.share(self.last_keep, jnp.sum(vision), vision.shape[0]), 1)

    @override
    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        return max(1, int(budgets.shares(self.last_keep, vision)[-1]))

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        before = one_frame_before(tokens)
        first, count = vision & (before < 0), self.count(vision)
        first = evenly(first, jnp.minimum(jnp.sum(first), count))
        changed = top(-cosine(tokens, before)[None], vision & (before >= 0), (count - jnp.sum(first))[None])[0]
        return first | changed


def cosine(tokens: Tokens, other: Int[Array, " T"]) -> Float[Array, " T"]:
    """Cosine of each token's embedding and that of another token, with features of the tower that are added later.

    Vectors that every layer mixes into its output are not such features; they are narrower.
    """
    added = () if tokens.added is None or tokens.added.shape[-1] != tokens.x.shape[-1] else tokens.added
    parts = [x.astype(jnp.float32) for x in (tokens.x, *added)]
    norm = jnp.sqrt(sum(jnp.sum(x**2, axis=-1) for x in parts))
    return sum(jnp.sum(x * x[other], axis=-1) for x in parts) / jnp.maximum(norm * norm[other], 1e-8)
