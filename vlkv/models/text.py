"""Llama, Mistral and Qwen2 without a tower: the methods serve text models too (PrefixKV, Tables 14 and 15)."""

from __future__ import annotations

from typing import NoReturn

from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import ModelConfig
from vlkv.decoder import Decoder
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.layers import Initializer


class TextModel(nnx.Module):
    """A decoder that knows its config."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        self.config = config
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        """Token embeddings."""
        return self.decoder.embedding(inputs.tokens)

    def watch(self, inputs: Inputs, blocks: tuple[int, ...]) -> NoReturn:
        """Refuses: there is no tower to watch."""
        del inputs, blocks
        raise InputError(f"{self.config.family} has no vision tower whose class token could rank its tokens")
