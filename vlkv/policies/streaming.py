"""StreamingLLM ("Local"): attention sinks and a recent window."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from vlkv.compression.observe import Observation
from vlkv.compression.option_types import Count
from vlkv.compression.policy import Facts, Policy
from vlkv.masks import first, ordinal


class StreamingLLM(Policy):
    """The first `sinks` tokens and the most recent ones (Xiao et al. 2024, Sec. 3.2).

    The authors rotate keys by their positions in the cache. Here keys keep the rotation of their positions in the
    prompt, as in papers that compare with this method.
    """

    sinks: Count = 4
    facts = Facts(
        paper="Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks",
        equations="Sec. 3.2",
        source="arXiv:2309.17453; github.com/mit-han-lab/streaming-llm",
        observes=False,
        idle=lambda self: ("smooth",),
    )

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Increases with the position."""
        return jnp.broadcast_to(ordinal(obs.valid).astype(jnp.float32), obs.k.shape[:2])

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """The sinks."""
        return first(obs.valid, jnp.minimum(self.sinks, obs.mean_budget))
