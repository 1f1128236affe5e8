"""Towers over images at native resolution (Qwen2-VL, Wang et al. 2024, and others). Their RoPE has two axes.

As in the references, attention stays within a frame, in videos too. RoPE rotates half of the channel pairs by the line
and half by the column, at the same frequencies. In a tower with windows (Qwen2.5-VL) most blocks attend within windows,
whose patches are contiguous. Tables of positions are interpolated, bilinearly (`corners`) or bicubically.

Axes: F frames · n patches of a frame with padding · C values of a patch · D width · H head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int
from typing_extensions import override

from vlkv.config import DecoderConfig, Raw, filled, number, positives, require
from vlkv.decoder.layers import Embedding, Initializer, Linear, Mlp
from vlkv.decoder.rope import cosines_and_sines
from vlkv.errors import InputError
from vlkv.towers.blocks import BlockConfig, VitBlock

# Field of the tower's config -> field of `vision_config`, in Qwen's form.
SIZES = {"width": "hidden_size", "mlp_width": "intermediate_size", "out_width": "out_hidden_size",
         "layers": "depth", "heads": "num_heads", "patch_size": "patch_size", "frames": "temporal_patch_size",
         "merge": "spatial_merge_size"}  # fmt: skip
_OTHER_NAMES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}  # transformers reads both


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeConfig(BlockConfig):
    """A tower over patches of `frames` x `patch_size` x `patch_size` pixels; `merge` x `merge` patches make a token."""

    patch_size: int  # pixels
    merge: int
    theta: float  # base of the frequencies of RoPE
    frames: int = 1  # pictures of a video in one patch; an image is repeated
    out_width: int = 0  # channels that the merger returns, if there is one
    norm: str = dataclasses.field()
    activation: str = dataclasses.field()
    gated: bool = dataclasses.field()
    window: int | None = None  # tokens per side of an attention window; None: the whole frame
    full: tuple[int, ...] = ()  # blocks that attend to the whole frame although `window` is set
    deep: tuple[int, ...] = ()  # blocks whose outputs are added after the decoder's first layers; increasing
    tokens_per_second: float | None = None  # temporal positions per second of a video; None: one per frame
    # Truncate the seconds of a frame before multiplication, as transformers 5.2 does. By default only the product is
    # truncated, as in later versions. To set it, use `dataclasses.replace` on the processor's `config`, or truncate
    # `second_per_grid_ts` before `Inputs.from_hf`.
    whole_seconds: bool = False

    patch_bias: ClassVar[bool] = False
    by_line: ClassVar[bool] = False  # the processor's patches are [3, p, p], line by line; else flat, token by token

    @property
    def patch_values(self) -> int:
        """Values of one patch."""
        return 3 * self.frames * self.patch_size**2

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of a patch as the processor returns it."""
        return (3 * self.frames, self.patch_size, self.patch_size) if self.by_line else (self.patch_values,)

    def patches(self, shape: tuple[int, ...]) -> int:
        """The number of patches that attend to one another. `shape` is that of the pixels, [F, n, C]."""
        return shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig(NativeConfig):
    """A tower that adds a square table of position embeddings to its patches. The patch embedding has a bias."""

    table: int  # positions per side of the square table
    aligned: ClassVar[bool] = True  # how the table is interpolated; see `corners`

    patch_bias = True


def tower_fields(raw: Raw, defaults: Raw) -> dict[str, Any]:
    """The fields of a `vision_config` in Qwen's form, with defaults, by the names in `SIZES`.

    A file may have other names for two of them, which decide if it has both: see `_OTHER_NAMES`.
    """
    renamed = {name: raw[other] for other, name in _OTHER_NAMES.items() if raw.get(other) is not None}
    return filled({**raw, **renamed}, defaults)


def read_sizes(c: Raw, names: Mapping[str, str], theta: float = 1e4) -> dict[str, Any]:
    """The fields of a tower's config that are sizes, and `theta`, the base of its rotary embedding.

    Args:
        c: a `vision_config` with its defaults.
        names: field of the tower's config -> field of `c`.
        theta: the base if `c` has none.

    Raises:
        InputError: a size is not a whole number of at least 1, or the channels or the RoPE are not supported.
    """
    where = "vision_config."
    field = "rope_scaling" if c.get("rope_scaling") else "rope_parameters"
    rope = c.get(field) or {}
    if not isinstance(rope, Mapping):
        raise InputError(f"config.json: {where}{field}={rope!r} must be an object")
    # transformers takes "default" in older files for "axial".
    require(f"{where}{field}.rope_type", rope.get("rope_type", rope.get("type", "axial")), "axial", "default")
    positives(c, names.values(), where)
    sizes: dict[str, Any] = {ours: c[theirs] for ours, theirs in names.items()}
    if sizes["width"] % (4 * sizes["heads"]):
        raise InputError(f"config.json: vision_config: {sizes['width']} channels must be {sizes['heads']} heads of a "
                         "multiple of four channels each")  # fmt: skip
    base = rope.get("rope_theta", c.get("rope_theta", theta))
    return sizes | {"theta": number(f"{where}rope_theta", base, above=1)}


def check_decoder(decoder: DecoderConfig, out_width: int) -> None:
    """Raises InputError unless the decoder has M-RoPE and the width `out_width`, which the tower's merger returns."""
    if decoder.rope.axes is None:
        raise InputError("config.json: rope_parameters.mrope_section is missing")
    if out_width != decoder.width:
        raise InputError(f"config.json: the tower of vision_config returns {out_width} channels, but the decoder takes "
                         f"{decoder.width}")  # fmt: skip


_SHARPNESS = -0.75  # for `cubic_weights`: the parameter a of cubic convolution (Keys 1981, Eq. 4), as in torch


class PatchMerger(Mlp):
    """Norm, concatenation of the merge x merge patches of a token, linear, exact (erf) GELU, linear.

    With `norms_tokens`, the norm is over the channels of a whole token, after the concatenation.
    """

    def __init__(self, c: NativeConfig, *, norms_tokens: bool = False, init: Initializer) -> None:
        self.unit, self.norms_tokens = c.merge**2, norms_tokens
        width = c.width * self.unit
        self.norm = dataclasses.replace(c, width=width if norms_tokens else c.width).make_norm(init=init)
        super().__init__(width, width, c.out_width, init=init)

    def __call__(self, x: Float[Array, "F n i"]) -> Float[Array, "V D"]:
        """The vision embeddings of all frames in one list."""
        x = x if self.norms_tokens else self.norm(x)
        x = rearrange(x, "f (v u) i -> (f v) (u i)", u=self.unit)
        return super().__call__(self.norm(x) if self.norms_tokens else x)


class NativeTower(nnx.Module):
    """Patch embedding and blocks. The patches of a frame attend to one another, or only those of a window."""

    block: Callable[..., Any] = VitBlock  # class attribute: makes a block from the config

    def __init__(self, c: NativeConfig, *, init: Initializer) -> None:
        self.config = c
        self.patch = Linear(c.patch_values, c.width, bias=c.patch_bias, init=init)
        self.blocks = nnx.data(tuple(type(self).block(c, init=init) for _ in range(c.layers)))

    def embed(self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"]) -> Float[Array, "F n D"]:
        """The input of the first block; `place` as in `with_attention`."""
        return self.patch(pixels)

    def rotation(self, angles: Float[Array, "F n 2 pairs"]) -> Any:
        """The argument `rotation` of the blocks, from the angles of channel pairs for line and column; lines first."""
        return cosines_and_sines(rearrange(angles, "f n two pairs -> f n (two pairs)"))

    def with_attention(
        self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"], blocks: tuple[int, ...]
    ) -> tuple[list[Float[Array, "F n D"]], list[Float[Array, "F N n"]]]:
        """Features of every patch, and the attention that each receives in the given blocks (negative: from the last).

        The features are the outputs of the blocks `config.deep` and of the last block. The attention is the mean over
        all patches of the frame. In a block with windows, patches of other windows count as zero. `place` is the line
        and column of each patch, -1 for padding.
        """
        c, n = self.config, pixels.shape[1]
        x, valid, features = self.embed(pixels, place), place[..., 0] >= 0, []
        pairs = c.width // c.heads // 4  # channel pairs of the line, and of the column
        frequency = c.theta ** -(jnp.arange(pairs, dtype=jnp.float32) / pairs)
        rotation = self.rotation(place.astype(jnp.float32)[..., None] * frequency)
        window = n if c.window is None else (c.window * c.merge) ** 2  # patches
        wanted, count = {i % len(self.blocks) for i in blocks}, jnp.maximum(jnp.sum(valid, axis=1), 1)
        received: dict[int, Array] = {}
        for i, block in enumerate(self.blocks):
            size = n if i in c.full else window  # patches that attend to one another
            # The patches of a window are contiguous, so a reshape makes each window a row of the batch.
            divide = partial(rearrange, pattern="f (w p) ... -> (f w) p ...", p=size)
            by_window = jax.tree.map(divide, (x, rotation, valid))
            if i in wanted:
                summed = rearrange(block.received_attention(*by_window), "(f w) h p -> f h (w p)", w=n // size)
                received[i] = summed / count[:, None, None]
            x = rearrange(block(*by_window), "(f w) p d -> f (w p) d", w=n // size)
            features += [x] * (i in c.deep)
        return [*features, x], [received[i % len(self.blocks)] for i in blocks]


class TableTower(NativeTower):
    """Patch embedding, position embeddings interpolated from a table, and blocks."""

    config: TableConfig

    def __init__(self, c: TableConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.positions = Embedding(c.table**2, c.width, init=init)

    @override
    def embed(self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"]) -> Float[Array, "F n D"]:
        index, weight = corners(place, self.config.table, aligned=self.config.aligned)
        position = jnp.einsum("fnkd,fnk->fnd", self.positions(index).astype(jnp.float32), weight)
        return self.patch(pixels) + position.astype(pixels.dtype)


def corners(
    place: Int[Array, "F n 2"], table: int, *, aligned: bool = True
) -> tuple[Int[Array, "F n 4"], Float[Array, "F n 4"]]:
    """The four entries of the table around each patch, and their weights in bilinear interpolation.

    `place` is the line and column of each patch, -1 for padding, whose weights are not used. `aligned`: the corner
    patches of a frame are at the corners of the table; otherwise the edges of the frame are at the edges of the table,
    beyond the centres of its entries.
    """
    last, line = jnp.max(place, axis=1, keepdims=True), jnp.maximum(place, 0).astype(jnp.float32)
    if aligned:
        at = line * (table - 1) / jnp.maximum(last, 1)  # [F, n, 2]; a single line is at the table's first one
    else:
        at = jnp.clip((line + 0.5) * table / jnp.maximum(last + 1, 1) - 0.5, 0, table - 1)
    first = jnp.floor(at).astype(jnp.int32)
    neighbours = jnp.stack([first, jnp.minimum(first + 1, table - 1)], axis=-1)  # [F, n, 2, 2]
    along_axis = jnp.stack([1 - (at - first), at - first], axis=-1)  # weights of the neighbours
    index = neighbours[..., 0, :, None] * table + neighbours[..., 1, None, :]
    weight = along_axis[..., 0, :, None] * along_axis[..., 1, None, :]
    return index.reshape(*place.shape[:2], 4), weight.reshape(*place.shape[:2], 4)


def cubic_weights(place: Int[Array, "F n"], table: int) -> Float[Array, "F n S"]:
    """Weights of a table's entries in bicubic interpolation along one axis, at the centres of the patches.

    The borders of a frame are at the borders of the table. Beyond them the table continues with its last entry, as
    torch's `grid_sample` does with `padding_mode="border"`. `place` is the line or column of each patch, -1 for
    padding.
    """
    count = jnp.max(place, axis=1, keepdims=True) + 1  # patches of the frame along this axis
    at = (place + 0.5) / jnp.maximum(count, 1) * table - 0.5
    taps = jnp.floor(at)[..., None] + jnp.arange(-1, 3)  # [F, n, 4]
    d, a = jnp.abs(at[..., None] - taps), _SHARPNESS
    # The kernel of cubic convolution, for distances d of up to 1, and from 1 to 2.
    near, far = ((a + 2) * d - (a + 3)) * d**2 + 1, a * (((d - 5) * d + 8) * d - 4)
    entry = jnp.clip(taps, 0, table - 1).astype(jnp.int32)
    is_entry = jax.nn.one_hot(entry, table)
    return jnp.einsum("fnt,fnts->fns", jnp.where(d <= 1, near, far), is_entry, precision="highest")
