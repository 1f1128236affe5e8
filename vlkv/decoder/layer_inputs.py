"""Vectors of each token for every layer, mixed into the layer's output (per-layer embeddings: Gemma 3n, Gemma 4).

They are the mean of a row of a table, which depends on the token's id, and of a projection of the first layer's input.

Axes: B batch · T tokens · D width · L layers · C channels of a vector.
"""

from __future__ import annotations

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from vlkv.config import DecoderConfig
from vlkv.decoder.layers import ACTIVATIONS, Embedding, Initializer, Linear, RMSNorm


class LayerInputs(nnx.Module):
    """Makes the vectors of all layers."""

    def __init__(self, c: DecoderConfig, *, init: Initializer) -> None:
        assert c.layer_inputs is not None
        own = c.layer_inputs
        self.table = Embedding(own.vocab_size, c.layers * own.width, scale=own.width**0.5, init=init)
        self.projection = Linear(c.width, c.layers * own.width, bias=False, init=init)
        self.norm = RMSNorm(own.width, c.norm_eps, offset=c.norm_offset, init=init)
        self.layers, self.pad = c.layers, own.pad

    def __call__(
        self, ids: Int[Array, "B T"], x: Float[Array, "B T D"], is_vision: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B L T C"]:
        """The vectors, from ids and the input of the first layer. Vision tokens have the row of the id `pad`."""
        ids = ids if is_vision is None else jnp.where(is_vision, self.pad, ids)
        by_id, projected = (
            rearrange(y, "b t (l c) -> b l t c", l=self.layers)
            for y in (self.table(ids), self.projection(x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype))
        )
        return (self.norm(projected) + by_id) * jnp.asarray(2**-0.5, x.dtype)


class MixLayerInput(nnx.Module):
    """Adds a token's vector for one layer to the layer's output: gated by the output, projected, and normalised."""

    def __init__(self, c: DecoderConfig, *, init: Initializer) -> None:
        assert c.layer_inputs is not None
        self.gate = Linear(c.width, c.layer_inputs.width, bias=False, init=init)
        self.projection = Linear(c.layer_inputs.width, c.width, bias=False, init=init)
        self.norm = RMSNorm(c.width, c.norm_eps, offset=c.norm_offset, init=init)
        self.activation = c.activation

    def __call__(self, x: Float[Array, "B T D"], given: Float[Array, "B T C"]) -> Float[Array, "B T D"]:
        """The layer's output with its vectors."""
        return x + self.norm(self.projection(ACTIVATIONS[self.activation](self.gate(x)) * given.astype(x.dtype)))
