"""One ViT for CLIP, SigLIP and similar towers, which differ only in settings of its config.

Axes: I images · V patches and the class token, if there is one · N heads · H head dim · D width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from vlkv.config import Raw, filled, positives, require, require_all
from vlkv.decoder.layers import (
    Embedding,
    Initializer,
    JoinHeads,
    LayerNorm,
    Linear,
    RMSNorm,
    SplitHeads,
    gelu,
    quick_gelu,
)
from vlkv.decoder.rope import apply_rope
from vlkv.errors import InputError
from vlkv.sharding.ops import attention_mass, by_row, prefill_attention

C = TypeVar("C", bound="VitConfig")
_ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu, "gelu_pytorch_tanh": jax.nn.gelu, "silu": jax.nn.silu}
# Field of `vision_config` -> field of BlockConfig or VitConfig.
_SIZES = {"hidden_size": "width", "intermediate_size": "mlp_width", "num_hidden_layers": "layers",
          "num_attention_heads": "heads", "image_size": "image_size", "patch_size": "patch_size"}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The blocks of a tower. Settings that all towers of one kind share are class variables."""

    width: int
    mlp_width: int
    layers: int
    heads: int

    activation: ClassVar[str] = "gelu"
    gated: ClassVar[bool] = False  # the MLP has a gate, and the activation is applied to the gate
    norm: ClassVar[str] = "layer_norm"
    norm_eps: ClassVar[float] = 1e-6
    qkv_bias: ClassVar[bool] = True
    qk_norm_eps: ClassVar[float | None] = None  # None: queries and keys are not normalised
    scaled: ClassVar[bool] = False  # a learnt factor per channel for the output of attention and of the MLP

    @property
    def blocks(self) -> int:
        """Number of blocks that run."""
        return self.layers

    def make_norm(self, *, init: Initializer) -> LayerNorm | RMSNorm:
        """A norm of the kind that the blocks use."""
        return (RMSNorm if self.norm == "rms_norm" else LayerNorm)(self.width, self.norm_eps, init=init)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitConfig(BlockConfig):
    """A tower over square images of one size.

    Attributes:
        feature_layer: number of blocks before the features; negative values count from the end, -1 means all blocks.
    """

    image_size: int
    patch_size: int
    norm_eps: float = dataclasses.field()
    feature_layer: int

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
        del shape
        return self.grid**2

    @classmethod
    def from_hf(cls: type[C], vision: Raw, feature_layer: object, *, whole: bool = True, **special: Any) -> C:
        """Reads a `vision_config`.

        Args:
            vision: its fields; missing ones get the value in `cls.defaults`.
            feature_layer: as in VitConfig; `config.json` has it outside `vision_config`.
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
    defaults: ClassVar = dict(
        model_type="clip_vision_model", hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
        num_attention_heads=12, image_size=224, patch_size=32, layer_norm_eps=1e-5,
    )  # fmt: skip

    @classmethod
    def from_config_json(cls, raw: Raw) -> ClipConfig:
        """The tower of a `config.json`, whose outer part has the feature layer and whether to keep the class token."""
        strategy = raw.get("vision_feature_select_strategy", "default")
        require("vision_feature_select_strategy", strategy, "default", "full")
        vision, layer = raw.get("vision_config") or {}, raw.get("vision_feature_layer", -2)
        return cls.from_hf(vision, layer, keep_class_token=strategy == "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipConfig(VitConfig):
    """SigLIP (Zhai et al. 2023), without its last norm."""

    activation = "gelu_pytorch_tanh"
    defaults: ClassVar = dict(
        model_type="siglip_vision_model", hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
        num_attention_heads=12, image_size=224, patch_size=16, layer_norm_eps=1e-6,
    )  # fmt: skip


class VitBlock(nnx.Module):
    """Pre-norm attention over all patches, then an MLP."""

    def __init__(self, c: BlockConfig, *, init: Initializer) -> None:
        head_dim = c.width // c.heads
        self.attention_norm = c.make_norm(init=init)
        self.query = SplitHeads(c.width, c.heads, head_dim, bias=c.qkv_bias, init=init)
        self.key = SplitHeads(c.width, c.heads, head_dim, bias=c.qkv_bias, init=init)
        self.value = SplitHeads(c.width, c.heads, head_dim, bias=c.qkv_bias, init=init)
        eps = c.qk_norm_eps
        self.query_norm = None if eps is None else RMSNorm(c.width, eps, init=init)
        self.key_norm = None if eps is None else RMSNorm(c.width, eps, init=init)
        self.out = JoinHeads(c.width, c.heads, head_dim, bias=True, init=init)
        self.attention_scale = init.constant(0.1, c.width) if c.scaled else None
        self.mlp_norm = c.make_norm(init=init)
        self.gate = Linear(c.width, c.mlp_width, bias=True, init=init) if c.gated else None
        self.up = Linear(c.width, c.mlp_width, bias=True, init=init)
        self.down = Linear(c.mlp_width, c.width, bias=True, init=init)
        self.mlp_scale = init.constant(0.1, c.width) if c.scaled else None
        self.activation = c.activation

    @jax.jit
    def __call__(
        self,
        x: Float[Array, "I V D"],
        rotation: Float[Array, "I V 1 H"] | None = None,
        valid: Bool[Array, "I V"] | None = None,
    ) -> Float[Array, "I V D"]:
        """One block.

        Args:
            x: all patches of each image.
            rotation: table for `apply_rope`; None: queries and keys are not rotated.
            valid: False for padding; None: there is no padding.
        """
        h = self.attention_norm(x)
        q, k = _normalised(self.query_norm, self.query(h)), _normalised(self.key_norm, self.key(h))
        if rotation is not None:
            q, k = apply_rope(q, rotation), apply_rope(k, rotation)
        attended = prefill_attention(q, k, self.value(h), valid=valid, causal=False)
        x = x + _times(self.attention_scale, self.out(attended))
        h, activation = self.mlp_norm(x), _ACTIVATIONS[self.activation]
        h = activation(self.up(h)) if self.gate is None else activation(self.gate(h)) * self.up(h)
        return x + _times(self.mlp_scale, self.down(h))

    def received_attention(
        self,
        x: Float[Array, "I V D"],
        rotation: Float[Array, "I V 1 H"] | None = None,
        valid: Bool[Array, "I V"] | None = None,
        *,
        rows: int | None = None,
    ) -> Float[Array, "I N V"]:
        """The attention that every patch receives in this block, summed over the first `rows` queries.

        Args:
            x: the block's input.
            rotation: as in `__call__`.
            valid: as in `__call__`.
            rows: 1: only the class token; None: all patches.
        """
        h = self.attention_norm(x)
        q, k = _normalised(self.query_norm, self.query(h[:, :rows])), _normalised(self.key_norm, self.key(h))
        if rotation is not None:
            q, k = apply_rope(q, rotation[:, :rows]), apply_rope(k, rotation)
        valid = jnp.ones(x.shape[:2], bool) if valid is None else valid

        def one(q: Float[Array, "N _rows H"], k: Float[Array, "N V H"], valid: Bool[Array, " V"]) -> Array:
            weight = valid[None, : q.shape[1]].astype(jnp.float32)
            return attention_mass(q, k, row_weight=weight, key_mask=valid, causal=False)[0]

        return by_row(one, len(x))(jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2), valid)


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

        This is the attention of the class token. If the tower has none, it is the mean over all patches.

        Args:
            pixels: of all images.
            blocks: indices of blocks up to the feature layer; negative ones count from the last.
        """
        c, p = self.config, self.config.patch_size
        used = c.grid * p  # a rest that is smaller than a patch is cut off
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
        skip, rows = int(c.class_token and not c.keep_class_token), 1 if c.class_token else x.shape[1]
        received = [self.blocks[i].received_attention(inputs[i], rows=rows) / rows for i in blocks]
        return x[:, skip:], [attention[..., skip:] for attention in received]

    def make_position_embedding(self, c: VitConfig, *, init: Initializer) -> Any:
        """The parameters of `position_embedding`."""
        return Embedding(c.positions, c.width, init=init)

    def position_embedding(self) -> Float[Array, "V D"]:
        """The vectors that are added to the embeddings of the patches."""
        return self.position.weight[...]


def _normalised(norm: RMSNorm | None, x: Float[Array, "I V N H"]) -> Float[Array, "I V N H"]:
    """`x` normalised over all heads together; `x` itself without a norm."""
    return x if norm is None else norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


def _times(scale: nnx.Param | None, x: Float[Array, "I V D"]) -> Float[Array, "I V D"]:
    return x if scale is None else scale[...] * x
