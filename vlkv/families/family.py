"""The record of a model family, and the base models that families derive from.

Axes: B batch · T tokens · I images · V vision tokens of one image · R vision embeddings of the batch in one list ·
S first layers of the decoder · W blocks of the tower whose attention is returned · N heads of the tower · C = W N ·
D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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
from vlkv.processing.host import HostConfig
from vlkv.towers.vit import Vit

Vision = Float[Array, "R D"]


class Embedded(NamedTuple):
    """Prompts as the decoder takes them."""

    x: Float[Array, "B T D"]  # input of the first layer: embeddings of text and of vision tokens
    added: Float[Array, "B S T _D"] | None = None  # what `Decoder.add_features` adds after each layer
    attention: Float[Array, "B W N T"] | None = None  # that each vision token receives in the tower, if asked for


class TextModel(nnx.Module):
    """A decoder without a vision tower."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        self.config = config
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs, blocks: tuple[int, ...] = ()) -> Embedded:
        """The decoder's input, and the attention that each vision token receives in the given blocks of the tower.

        This is the attention of the class token. If the tower has none, it is the mean over the attention of all
        patches. Negative blocks count from the last one. Raises InputError if blocks are given, but the model has no
        tower.
        """
        if blocks:
            raise InputError(f"{self.config.family} has no vision tower, so its attention cannot rank vision tokens")
        return self.embed_text(inputs.tokens)

    def embed_text(self, tokens: Int[Array, "B T"]) -> Embedded:
        """The decoder's input for tokens of text."""
        x = self.decoder.embedding(tokens)
        return Embedded(x, self.decoder.inputs_of_layers(tokens, x))


class VisionLanguageModel(TextModel):
    """Tower, projector, splice, decoder. A family overrides what is special about it."""

    tower: Callable[..., nnx.Module] = Vit  # class attribute: makes the tower from `config.vision`
    vision: Any
    projector: Any

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        self.config = config
        self.vision = type(self).tower(config.vision, init=init)
        self.projector = self.make_projector(config, init=init)
        self.decoder = Decoder(config.decoder, init=init)

    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module | None:
        """The module from the tower's width to the decoder's: by default two linear maps. None: no projector."""
        width = config.decoder.width
        return Mlp(config.vision.width, width, width, bias=config.projector_bias, init=init)

    def run_tower(
        self, inputs: Inputs, pixels: Array, blocks: tuple[int, ...]
    ) -> tuple[Any, list[Float[Array, "I N V"]]]:
        """Runs the tower on all images.

        Args:
            inputs: `layout` has the further arrays that some towers need, such as the positions of patches.
            pixels: `inputs.pixels` in the decoder's dtype.
            blocks: indices of blocks of the tower; negative ones count from the last.

        Returns:
            The features, in the form that `project` takes, and for each of `blocks` the attention that each feature
            receives in it.
        """
        return self.vision.with_attention(pixels, blocks)

    def project(self, features: Any, inputs: Inputs) -> Vision:
        """The vision embeddings of the tower's features, in the order in which `inputs.vision_index` counts them."""
        return flat(features if self.projector is None else self.projector(features))

    def project_added(self, features: Any) -> tuple[Vision, ...]:
        """Embeddings to add to the vision tokens after the decoder's first layers: one array per layer, from the first.

        The rows have the order of `project`.
        """
        return ()

    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        """Attention that each vision embedding receives, given what each feature receives.

        A family whose `project` merges several features into one embedding must merge their attention here.
        """
        return flat(attention)

    @override
    def embed(self, inputs: Inputs, blocks: tuple[int, ...] = ()) -> Embedded:
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:  # no images; or a benchmark skips the tower
            layer_inputs = self.decoder.inputs_of_layers(inputs.tokens, x, inputs.is_vision)
            return Embedded(x, layer_inputs, jnp.zeros((x.shape[0], len(blocks), 1, x.shape[1])) if blocks else None)
        features, attention = self.run_tower(inputs, inputs.pixels.astype(x.dtype), blocks)
        spliced = splice(x, self.project(features, inputs), inputs.vision_index)
        additions = [splice(jnp.zeros_like(x), vision, inputs.vision_index) for vision in self.project_added(features)]
        layer_inputs = self.decoder.inputs_of_layers(inputs.tokens, spliced, inputs.is_vision)
        added = jnp.stack(additions, axis=1) if additions else layer_inputs
        if not blocks:
            return Embedded(spliced, added)
        stacked = jnp.stack(attention).transpose(1, 3, 0, 2)  # [I, V, W, N]
        pooled = self.pool(stacked.reshape(*stacked.shape[:2], -1), inputs)
        received = splice(jnp.zeros((*x.shape[:2], pooled.shape[-1]), pooled.dtype), pooled, inputs.vision_index)
        return Embedded(spliced, added, received.reshape(*x.shape[:2], *stacked.shape[2:]).transpose(0, 2, 3, 1))


def flat(x: Float[Array, "*I D"]) -> Vision:
    """The embeddings of all images in one list."""
    return x.reshape(-1, x.shape[-1])


def splice(x: Float[Array, "B T D"], vision: Vision, vision_index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """`x`, in which each token with `vision_index` >= 0 is replaced by that row of `vision`."""
    return jnp.where(vision_index[..., None] >= 0, vision[jnp.maximum(vision_index, 0)].astype(x.dtype), x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """All that the library knows about one `model_type`."""

    config: type[HostConfig]  # reads `config.json` and turns images into `Inputs` on the host
    model: Callable[..., TextModel]  # the parameters and the computation
    names: Callable[[Any], Names]  # the checkpoint's names of the parameters
    # Given `config.json` and a function that reads another JSON file of the folder by its name, returns `config.json`
    # with what the family needs from that file.
    complete: Callable[[Raw, Callable[[str], Raw | None]], dict[str, Any]] | None = None
    special: tuple[str, ...] = ()  # special tokens whose ids follow those of a tiktoken file
    # Whether a `config.json` belongs to this family although its `model_type` names another; None: never.
    claims: Callable[[Raw], bool] | None = None
