"""Gemma 4: the patches of a token are averaged, standardised, normalised and projected."""

from __future__ import annotations

import jax.numpy as jnp
from einops import reduce
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer, Linear, rms_normalised
from vlkv.families.gemma4.tower import Gemma4Tower
from vlkv.families.qwen2_vl.model import Qwen2Vl
from vlkv.inputs import Inputs


class Gemma4(Qwen2Vl):
    """The model of Qwen2-VL with another tower and projector."""

    tower = Gemma4Tower

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return Linear(config.vision.width, config.decoder.width, bias=False, init=init)

    @override
    def project(self, features: list[Float[Array, "F n d"]], inputs: Inputs) -> Float[Array, "R D"]:
        c, tower = self.config.vision, self.vision
        # In float32, because sqrt(width) makes features large, and the bias makes them small again.
        x = reduce(features[-1].astype(jnp.float32), "f (v u) d -> (f v) d", "mean", u=c.merge**2) * c.width**0.5
        if tower.bias is not None:
            x = (x - tower.bias[...].astype(jnp.float32)) * tower.scale[...].astype(jnp.float32)
        return self.projector(rms_normalised(x.astype(features[-1].dtype), c.norm_eps))
