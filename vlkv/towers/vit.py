"""One ViT for every tower of its shape; what differs between CLIP, SigLIP and others are settings of its config.

Axes: I images · V patches, and the class token where there is one · N heads · H head dim · D width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from vlkv.config import Raw, filled, honour, positives, require
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
from vlkv.decoder.rope import turn
from vlkv.errors import InputError
from vlkv.parallel import attention_mass, by_row, prefill_attention

C = TypeVar("C", bound="VitConfig")
_ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu, "gelu_pytorch_tanh": jax.nn.gelu, "silu": jax.nn.silu}
# Field of `vision_config` -> ours.
_SIZES = {"hidden_size": "width", "intermediate_size": "mlp_width", "num_hidden_layers": "layers",
          "num_attention_heads": "heads", "image_size": "image_size", "patch_size": "patch_size"}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The blocks of a tower. What all towers of a kind have in common is said once, by the class."""

    width: int
    mlp_width: int
    layers: int
    heads: int

    activation: ClassVar[str] = "gelu"
    gated: ClassVar[bool] = False  # the MLP has a gate, which the activation acts on
    norm: ClassVar[str] = "layer_norm"
    norm_eps: ClassVar[float] = 1e-6
    qkv_bias: ClassVar[bool] = True
    qk_norm_eps: ClassVar[float | None] = None  # None: queries and keys are not normalised
    scaled: ClassVar[bool] = False  # each branch of a block, channel by channel

    @property
    def blocks(self) -> int:
        """Blocks that run."""
        return self.layers

    def make_norm(self, *, init: Initializer) -> LayerNorm | RMSNorm:
        """A norm as the blocks have it."""
        return (RMSNorm if self.norm == "rms_norm" else LayerNorm)(self.width, self.norm_eps, init=init)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitConfig(BlockConfig):
    """A tower over square pictures of one size.

    Attributes:
        feature_layer: after how many blocks features are taken; negative: counted from behind, -1 after the last.
    """

    image_size: int
    patch_size: int
    norm_eps: float = dataclasses.field()
    feature_layer: int

    class_token: ClassVar[bool] = False  # takes part in every block
    keep_class_token: ClassVar[bool] = False  # and is a feature as well
    patch_bias: ClassVar[bool] = True
    first_norm: ClassVar[bool] = False  # before the first block
    defaults: ClassVar[Raw] = {}  # of `vision_config`, as transformers' class has them

    @property
    def grid(self) -> int:
        """Patches per side; pixels that fill no patch are cut off."""
        return self.image_size // self.patch_size

    @property
    def positions(self) -> int:
        """Position embeddings."""
        return self.grid**2 + self.class_token

    @property
    def tokens(self) -> int:
        """Features of one image."""
        return self.grid**2 + self.keep_class_token

    @property
    def blocks(self) -> int:
        """Blocks that run: those up to the feature layer."""
        return self.feature_layer if self.feature_layer >= 0 else self.layers + 1 + self.feature_layer

    def patches(self, shape: tuple[int, ...]) -> int:
        """Patches that attend to one another, of pixels of this shape [I, ...]."""
        del shape
        return self.grid**2

    @classmethod
    def from_hf(cls: type[C], vision: Raw, feature_layer: object, *, whole: bool = True, **special: Any) -> C:
        """Reads a `vision_config`.

        Args:
            vision: its fields; missing ones are `cls.defaults`.
            feature_layer: that field, which is outside.
            whole: whether patches must fill the image.
            special: fields of the kind.

        Raises:
            InputError: a field that we do not honour.
        """
        c, where = filled(vision, cls.defaults), "vision_config."
        honour(c, {"model_type": cls.defaults["model_type"], "num_channels": 3, "hidden_act": cls.activation}, where)
        for field in ("image_size", "patch_size"):  # may be written as two numbers
            size = c[field]
            c[field] = size[0] if isinstance(size, list | tuple) and len({*size}) == 1 and len(size) == 2 else size
        positives(c, _SIZES, where)
        if c["image_size"] < c["patch_size"] or (whole and c["image_size"] % c["patch_size"]):
            raise InputError("config.json: vision_config: patch_size must divide image_size")
        if c["hidden_size"] % c["num_attention_heads"]:
            raise InputError("config.json: vision_config: heads must divide the hidden_size")
        layers = c["num_hidden_layers"]
        if not isinstance(feature_layer, int) or not -layers - 1 <= feature_layer <= layers:
            raise InputError(f"config.json: vision_feature_layer={feature_layer!r}: the feature layer is one number")
        sizes = {ours: c[field] for field, ours in _SIZES.items()}
        return cls(**sizes, norm_eps=c["layer_norm_eps"], feature_layer=feature_layer, **special)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipConfig(VitConfig):
    """CLIP (Radford et al. 2021); features are taken before the tower's own last norm."""

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
    def beside(cls, raw: Raw) -> ClipConfig:
        """Reads a whole `config.json`: the feature layer and what becomes of the class token are beside the tower."""
        strategy = raw.get("vision_feature_select_strategy", "default")
        require("vision_feature_select_strategy", strategy, "default", "full")
        vision, layer = raw.get("vision_config") or {}, raw.get("vision_feature_layer", -2)
        return cls.from_hf(vision, layer, keep_class_token=strategy == "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipConfig(VitConfig):
    """SigLIP (Zhai et al. 2023); features are taken before the tower's own last norm."""

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

    def __call__(
        self,
        x: Float[Array, "I V D"],
        rotation: Float[Array, "I V 1 H"] | None = None,
        valid: Bool[Array, "I V"] | None = None,
    ) -> Float[Array, "I V D"]:
        """One block.

        Args:
            x: all patches of each image.
            rotation: of queries and keys by their places; None: none.
            valid: which patches are no padding; None: all.
        """
        h = self.attention_norm(x)
        q, k = _normalised(self.query_norm, self.query(h)), _normalised(self.key_norm, self.key(h))
        if rotation is not None:
            q, k = turn(q, rotation), turn(k, rotation)
        attended = prefill_attention(q, k, self.value(h), valid=valid, causal=False)
        x = x + _times(self.attention_scale, self.out(attended))
        h, activation = self.mlp_norm(x), _ACTIVATIONS[self.activation]
        h = activation(self.up(h)) if self.gate is None else activation(self.gate(h)) * self.up(h)
        return x + _times(self.mlp_scale, self.down(h))

    def received(
        self,
        x: Float[Array, "I V D"],
        rotation: Float[Array, "I V 1 H"] | None = None,
        valid: Bool[Array, "I V"] | None = None,
        *,
        rows: int | None = None,
    ) -> Float[Array, "I N V"]:
        """The attention of this block that every patch receives from the first `rows` patches, summed over them.

        Args:
            x: the block's input.
            rotation: as in `__call__`.
            valid: likewise.
            rows: 1 for the class token's own attention; None: all.
        """
        h = self.attention_norm(x)
        q, k = _normalised(self.query_norm, self.query(h[:, :rows])), _normalised(self.key_norm, self.key(h))
        if rotation is not None:
            q, k = turn(q, rotation[:, :rows]), turn(k, rotation)
        valid = jnp.ones(x.shape[:2], bool) if valid is None else valid

        def one(q: Float[Array, "N _rows H"], k: Float[Array, "N V H"], valid: Bool[Array, " V"]) -> Array:
            weight = valid[None, : q.shape[1]].astype(jnp.float32)
            return attention_mass(q, k, row_weight=weight, key_mask=valid, causal=False)[0]

        return by_row(one, len(x))(jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2), valid)


class Vit(nnx.Module):
    """Patches, then blocks up to the feature layer."""

    def __init__(self, c: VitConfig, *, init: Initializer) -> None:
        self.config = c
        self.patch = init.normal(c.width, 3, c.patch_size, c.patch_size, scale=(3 * c.patch_size**2) ** -0.5)
        self.patch_bias = init.constant(0.0, c.width) if c.patch_bias else None
        self.class_token = init.normal(c.width, scale=c.width**-0.5) if c.class_token else None
        self.position = self.make_places(c, init=init)
        self.first_norm = LayerNorm(c.width, c.norm_eps, init=init) if c.first_norm else None
        self.blocks = nnx.data(tuple(VitBlock(c, init=init) for _ in range(c.blocks)))

    def watch(
        self, pixels: Float[Array, "I 3 h w"], blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "I V D"], list[Float[Array, "I N V"]]]:
        """Features of every image, in raster order, and the attention that they receive in some of the blocks.

        Args:
            pixels: of all images.
            blocks: among those that run; negative: from the last. The attention is that of the class token. Where the
                tower has none, it is the mean over all patches.
        """
        c, p = self.config, self.config.patch_size
        used = c.grid * p  # a margin that fills no patch is left out
        x = rearrange(pixels[..., :used, :used], "i c (y a) (x b) -> i (y x) c a b", a=p, b=p)
        x = jnp.einsum("ivcab,dcab->ivd", x, self.patch[...])
        x = x if self.patch_bias is None else x + self.patch_bias[...]
        if self.class_token is not None:
            first = jnp.broadcast_to(self.class_token[...], (len(x), 1, c.width))
            x = jnp.concatenate([first, x], axis=1)
        x = x + self.places()
        x = x if self.first_norm is None else self.first_norm(x)
        inputs = []
        for block in self.blocks:
            inputs.append(x)
            x = block(x)
        skip, rows = int(c.class_token and not c.keep_class_token), 1 if c.class_token else x.shape[1]
        given = [self.blocks[i].received(inputs[i], rows=rows) / rows for i in blocks]
        return x[:, skip:], [attention[..., skip:] for attention in given]

    def make_places(self, c: VitConfig, *, init: Initializer) -> Any:
        """The parameters behind `places`."""
        return Embedding(c.positions, c.width, init=init)

    def places(self) -> Float[Array, "V D"]:
        """What is added to each patch for its place."""
        return self.position.weight[...]


def _normalised(norm: RMSNorm | None, x: Float[Array, "I V N H"]) -> Float[Array, "I V N H"]:
    """Over all heads together."""
    return x if norm is None else norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


def _times(scale: nnx.Param | None, x: Float[Array, "I V D"]) -> Float[Array, "I V D"]:
    return x if scale is None else scale[...] * x
