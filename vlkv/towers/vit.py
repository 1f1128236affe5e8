"""One ViT for CLIP, SigLIP and similar towers, which differ only in settings of its config.

Axes: I images · V patches and the class token, if there is one · N heads · H head dim · D width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import Raw, filled, positives, require, require_all
from vlkv.decoder.layers import Embedding, Initializer, LayerNorm
from vlkv.errors import InputError
from vlkv.files import class_defaults
from vlkv.towers.blocks import BlockConfig, VitBlock

C = TypeVar("C", bound="VitConfig")
# What transformers takes for a LLaVA without `vision_config`; an empty one has the defaults of CLIP's class.
CLIP_LARGE = dict(model_type="clip_vision_model", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                  num_attention_heads=16, image_size=336, patch_size=14)  # fmt: skip
_DEFAULTS = class_defaults("vit")
# Field of `vision_config` -> field of BlockConfig or VitConfig.
_SIZES = {"hidden_size": "width", "intermediate_size": "mlp_width", "num_hidden_layers": "layers",
          "num_attention_heads": "heads", "image_size": "image_size", "patch_size": "patch_size"}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitConfig(BlockConfig):
    """A tower over square images of one size."""

    image_size: int
    patch_size: int
    norm_eps: float = dataclasses.field()
    feature_layer: int  # number of blocks before the features; negative: from the end, -1 means all blocks

    class_token: ClassVar[bool] = False  # the tower has one
    keep_class_token: ClassVar[bool] = False  # it is returned as a feature
    patch_bias: ClassVar[bool] = True
    first_norm: ClassVar[bool] = False  # before the first block
    defaults: ClassVar[Raw] = {}  # of `vision_config`, as in transformers' class

    @property
    def grid(self) -> int:
        """Patches per side; leftover pixels are cropped."""
        return self.image_size // self.patch_size

    @property
    def positions(self) -> int:
        """Number of position embeddings."""
        return self.grid**2 + self.class_token

    @property
    def tokens(self) -> int:
        """Number of features of one image."""
        return self.grid**2 + self.keep_class_token

    @property
    @override
    def blocks(self) -> int:
        return self.feature_layer if self.feature_layer >= 0 else self.layers + 1 + self.feature_layer

    def patches(self, shape: tuple[int, ...]) -> int:
        """The number of patches that attend to one another. `shape` is that of the pixels, [I, ...]."""
        return self.grid**2

    @classmethod
    def from_hf(cls: type[C], vision: Raw, feature_layer: object, *, whole: bool = True, **special: Any) -> C:
        """Reads a `vision_config`.

        Args:
            vision: its fields; `cls.defaults` replaces missing ones.
            feature_layer: `vision_feature_layer`, which `config.json` has outside of `vision_config`.
            whole: whether patch_size must divide image_size.
            special: fields that only this kind of tower has.

        Raises:
            InputError: an unsupported value.
        """
        c, where = filled(vision, cls.defaults), "vision_config."
        fixed = {"model_type": cls.defaults["model_type"], "num_channels": 3, "hidden_act": cls.activation}
        require_all(c, fixed, where)
        for field in ("image_size", "patch_size"):  # a number, or a list of two equal numbers
            size = c[field]
            c[field] = size[0] if isinstance(size, list | tuple) and len({*size}) == 1 and len(size) == 2 else size
        positives(c, _SIZES, where)
        if c["image_size"] < c["patch_size"] or (whole and c["image_size"] % c["patch_size"]):
            raise InputError("config.json: vision_config: patch_size must divide image_size")
        if c["hidden_size"] % c["num_attention_heads"]:
            raise InputError("config.json: vision_config: heads must divide the hidden_size")
        layers = c["num_hidden_layers"]
        if not isinstance(feature_layer, int) or not -layers - 1 <= feature_layer <= layers:
            raise InputError(f"config.json: vision_feature_layer={feature_layer!r} must be one number from "
                             f"{-layers - 1} to {layers}")  # fmt: skip
        sizes = {ours: c[field] for field, ours in _SIZES.items()}
        return cls(**sizes, norm_eps=c["layer_norm_eps"], feature_layer=feature_layer, **special)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipConfig(VitConfig):
    """CLIP (Radford et al. 2021), without its last norm."""

    keep_class_token: bool = dataclasses.field()

    class_token = True
    patch_bias = False
    first_norm = True
    activation = "quick_gelu"
    defaults: ClassVar = _DEFAULTS["clip_vision_model"]

    @classmethod
    def from_config_json(cls, raw: Raw) -> ClipConfig:
        """The tower of a `config.json`, whose outer part has the feature layer and whether to keep the class token."""
        strategy = raw.get("vision_feature_select_strategy", "default")
        require("vision_feature_select_strategy", strategy, "default", "full")
        vision, layer = raw.get("vision_config"), raw.get("vision_feature_layer", -2)
        return cls.from_hf(CLIP_LARGE if vision is None else vision, layer, keep_class_token=strategy == "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipConfig(VitConfig):
    """SigLIP (Zhai et al. 2023), without its last norm."""

    activation = "gelu_pytorch_tanh"
    defaults: ClassVar = _DEFAULTS["siglip_vision_model"]


class Vit(nnx.Module):
    """Patch embedding, position embedding, and the blocks up to the feature layer."""

    def __init__(self, c: VitConfig, *, init: Initializer) -> None:
        self.config = c
        self.patch = init.normal(c.width, 3, c.patch_size, c.patch_size, scale=(3 * c.patch_size**2) ** -0.5)
        self.patch_bias = init.constant(0.0, c.width) if c.patch_bias else None
        self.class_token = init.normal(c.width, scale=c.width**-0.5) if c.class_token else None
        self.position = self.make_position_embedding(c, init=init)
        self.first_norm = LayerNorm(c.width, c.norm_eps, init=init) if c.first_norm else None
        self.blocks = nnx.data(tuple(VitBlock(c, init=init) for _ in range(c.blocks)))

    def with_attention(
        self, pixels: Float[Array, "I 3 h w"], blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "I V D"], list[Float[Array, "I N V"]]]:
        """Features of every image, in raster order, and the attention that they receive in the given blocks.

        This is the attention of the class token. If the tower has none, it is the mean over all patches. Negative
        blocks count from the feature layer.
        """
        c, p = self.config, self.config.patch_size
        used = c.grid * p  # leftover pixels are cropped
        x = rearrange(pixels[..., :used, :used], "i c (y a) (x b) -> i (y x) c a b", a=p, b=p)
        x = jnp.einsum("ivcab,dcab->ivd", x, self.patch[...])
        x = x if self.patch_bias is None else x + self.patch_bias[...]
        if self.class_token is not None:
            first = jnp.broadcast_to(self.class_token[...], (len(x), 1, c.width))
            x = jnp.concatenate([first, x], axis=1)
        x = x + self.position_embedding()
        x = x if self.first_norm is None else self.first_norm(x)
        inputs = []
        for block in self.blocks:
            inputs.append(x)
            x = block(x)
        # A class token that is not kept is removed. The attention is that of the first `rows` queries.
        skip, rows = int(c.class_token and not c.keep_class_token), 1 if c.class_token else x.shape[1]
        received = [self.blocks[i].received_attention(inputs[i], rows=rows) / rows for i in blocks]
        return x[:, skip:], [attention[..., skip:] for attention in received]

    def make_position_embedding(self, c: VitConfig, *, init: Initializer) -> Any:
        """The parameters of `position_embedding`."""
        return Embedding(c.positions, c.width, init=init)

    def position_embedding(self) -> Float[Array, "V D"]:
        """The vectors that are added to the embeddings of the patches."""
        return self.position.weight[...]


class NormedVit(Vit):
    """A ViT whose features are normalised."""

    def __init__(self, c: VitConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.last_norm = c.make_norm(init=init)

    @override
    def with_attention(
        self, pixels: Float[Array, "I 3 h w"], blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "I V D"], list[Float[Array, "I N V"]]]:
        features, received = super().with_attention(pixels, blocks)
        return self.last_norm(features), received
