"""The seams: forward (more to follow)."""

from __future__ import annotations

from jaxtyping import Array, Float

from vlkv.inputs import Inputs
from vlkv.models import Model


def forward(params: Model, inputs: Inputs) -> Float[Array, "B T vocab"]:
    """Logits of every position, without a cache: for parity checks and training."""
    return params.decoder.logits(params.decoder(params.embed(inputs), inputs.positions, inputs.valid))
