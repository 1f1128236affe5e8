"""What a family is, and the base models that families derive from.

Axes: B batch · T tokens · I images · V vision tokens of one · R flat vision embeddings · W watched blocks · N heads of
the tower · D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from typing_extensions import override

from checkpoints_convert.entry import Names
from vlkv.config import ModelConfig, Raw
from vlkv.decoder import Decoder
from vlkv.decoder.layers import Initializer, Mlp
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.processing.arranging import TextInputs

Vision = Float[Array, "R D"]


class TextModel(nnx.Module):
    """A decoder that knows its config."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        self.config = config
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        """Token embeddings, with those of pictures in their places."""
        return self.decoder.embedding(inputs.tokens)

    def watch(
        self, inputs: Inputs, blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W N T"] | None]:
        """The same, with what the tower's class token gave to each vision token in some of its blocks.

        Raises:
            InputError: the model has no tower with a class token.
        """
        del inputs, blocks
        raise InputError(f"{self.config.family} has no class token in a vision tower to rank its vision tokens by")


class VisionLanguageModel(TextModel):
    """Tower, projector, splice, decoder. A family makes the modules and overrides what is special about it."""

    tower: Callable[..., nnx.Module]  # of the class: makes the tower from its config
    vision: Any
    projector: Any

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        self.config = config
        self.vision = type(self).tower(config.vision, init=init)
        self.projector = self.make_projector(config, init=init)
        self.make_more(config, init=init)
        self.decoder = Decoder(config.decoder, init=init)

    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module | None:
        """From the tower's width to the decoder's: by default two linear maps."""
        width = config.decoder.width
        return Mlp(config.vision.width, width, width, bias=config.projector_bias, init=init)

    def make_more(self, config: ModelConfig, *, init: Initializer) -> None:
        """Parameters beyond tower, projector and decoder, if there are any."""

    def see(self, inputs: Inputs, pixels: Array, blocks: tuple[int, ...]) -> tuple[Array, list[Float[Array, "I N V"]]]:
        """The tower's features of all pictures, and the class token's attention in some of its blocks."""
        del inputs
        return self.vision.watch(pixels, blocks) if blocks else (self.vision(pixels), [])

    def project(self, features: Array, inputs: Inputs) -> Vision:
        """Features to the flat vision embeddings that `vision_index` counts."""
        del inputs
        return flat(self.projector(features))

    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        """What was given to each feature to what was given to each embedding, as `project` joins features."""
        del inputs
        return flat(attention)

    @override
    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        return self._embed(inputs, ())[0]

    @override
    def watch(
        self, inputs: Inputs, blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W N T"] | None]:
        if not getattr(self.config.vision, "class_token", False):
            return super().watch(inputs, blocks)
        return self._embed(inputs, blocks)

    def _embed(
        self, inputs: Inputs, blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W N T"] | None]:
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:
            return x, None
        features, rows = self.see(inputs, inputs.pixels.astype(x.dtype), blocks)
        x = splice(x, self.project(features, inputs), inputs.vision_index)
        if not blocks:
            return x, None
        stacked = jnp.stack(rows).transpose(1, 3, 0, 2)  # [I, V, W, N]
        given = self.pool(stacked.reshape(*stacked.shape[:2], -1), inputs)
        given = given[jnp.maximum(inputs.vision_index, 0)]
        given = jnp.where(inputs.vision_index[..., None] >= 0, given, 0.0)
        return x, given.reshape(*x.shape[:2], *stacked.shape[2:]).transpose(0, 2, 3, 1)


def flat(x: Float[Array, "I V D"]) -> Vision:
    """The pictures' embeddings in one list."""
    return x.reshape(-1, x.shape[-1])


def splice(x: Float[Array, "B T D"], vision: Vision, vision_index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Row `vision_index` of the flat vision embeddings where it is >= 0, the token's own elsewhere."""
    return jnp.where(vision_index[..., None] >= 0, vision[jnp.maximum(vision_index, 0)].astype(x.dtype), x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`.

    Attributes:
        config: reads `config.json`, and does the host's part of the work.
        model: the parameters and what they compute.
        names: how checkpoints name the parameters.
        published: the sizes that were published: the part of a `config.json` that matters, by the name of a preset. An
            end of sequence that is in `generation_config.json` only is written into it.
        complete: a folder's `config.json` with what is beside it in the folder; None: it is complete.
        special: tokens whose ids follow those of a tiktoken file, for families that are published with one.
        claims: whether a `config.json` is of this family although it bears the `model_type` of another; None: none is.
    """

    config: type[TextInputs]
    model: Callable[..., TextModel]
    names: Callable[[Any], Names]
    published: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    complete: Callable[[Raw, Callable[[str], Raw | None]], dict[str, Any]] | None = None
    special: tuple[str, ...] = ()
    claims: Callable[[Raw], bool] | None = None
