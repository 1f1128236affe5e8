"""Configs of towers over images at native resolution. Their RoPE has two axes, line and column."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from vlkv.config import DecoderConfig, Raw, filled, number, positives, require
from vlkv.errors import InputError
from vlkv.towers.blocks import BlockConfig

# Field of the tower's config -> field of `vision_config`, in Qwen's form.
SIZES = {"width": "hidden_size", "mlp_width": "intermediate_size", "out_width": "out_hidden_size",
         "layers": "depth", "heads": "num_heads", "patch_size": "patch_size", "frames": "temporal_patch_size",
         "merge": "spatial_merge_size"}  # fmt: skip
_OTHER_NAMES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}  # transformers reads both


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeConfig(BlockConfig):
    """A tower over patches of `frames` x `patch_size` x `patch_size` pixels; `merge` x `merge` make a token."""

    patch_size: int  # pixels
    merge: int
    theta: float  # base of the frequencies of RoPE
    frames: ClassVar[int] = 1
    window: ClassVar[int | None] = None  # tokens per side of an attention window; None: the whole frame
    full: ClassVar[tuple[int, ...]] = ()  # blocks that attend to the whole frame although `window` is set
    deep: ClassVar[tuple[int, ...]] = ()  # blocks whose outputs are features too; increasing
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


def tower_fields(raw: Raw, defaults: Raw) -> dict[str, Any]:
    """The fields of a `vision_config` in Qwen's form, with defaults. The other name decides if both are given."""
    given = {name: raw[other] for other, name in _OTHER_NAMES.items() if raw.get(other) is not None}
    return filled({**raw, **given}, defaults)


def read_sizes(c: Raw, names: Mapping[str, str], theta: float = 1e4) -> dict[str, Any]:
    """The sizes of a tower, and `theta`, the base of its rotary embedding (by default as given).

    `names` maps fields of the tower's config to fields of `c`, a `vision_config` with its defaults. Raises InputError
    for a size that is not a whole number of at least 1, and for unsupported channels or RoPE.
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
    """Raises InputError unless the decoder has M-RoPE and takes `out_width` channels, those of the tower's merger."""
    if decoder.rope.axes is None:
        raise InputError("config.json: rope_parameters.mrope_section is missing")
    if out_width != decoder.width:
        raise InputError(f"config.json: the tower of vision_config returns {out_width} channels, but the decoder takes "
                         f"{decoder.width}")  # fmt: skip
