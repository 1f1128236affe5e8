"""The towers of Qwen2-VL and Qwen2.5-VL, which take pictures at their own size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import positive, require
from vlkv.errors import InputError

# The class defaults of transformers, by family.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": dict(depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16, hidden_size=3584, patch_size=14,
                     spatial_merge_size=2, temporal_patch_size=2, hidden_act="quick_gelu"),
    "qwen2_5_vl": dict(depth=32, hidden_size=3584, intermediate_size=3420, num_heads=16, out_hidden_size=3584,
                       patch_size=14, spatial_merge_size=2, temporal_patch_size=2, hidden_act="silu", window_size=112,
                       fullatt_block_indexes=(7, 15, 23, 31), tokens_per_second=4),
}  # fmt: skip
_COUNTS = ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVisionConfig:
    """A tower over patches of `frames` x `patch_size` x `patch_size` pixels, `merge` x `merge` of which make a token.

    Attributes:
        gated: blocks of RMSNorm and a gated SiLU MLP (Qwen2.5-VL), not of LayerNorm and quick GELU (Qwen2-VL).
        window: tokens per side of an attention window; None: every block sees the whole frame.
        full: the blocks that see the whole frame although there are windows.
        tokens_per_second: how far a second moves the temporal position of a video; None: a frame moves it by one.
        whole_seconds: truncate the seconds of a frame before they are multiplied, as transformers 5.2 does; later
            ones truncate the product alone, as here by default. `dataclasses.replace` the processor's `config` to
            choose, or truncate `second_per_grid_ts` before `Inputs.from_hf`.
    """

    width: int
    mlp_width: int
    layers: int
    heads: int
    out_width: int
    patch_size: int  # pixels
    frames: int  # of a video that one patch spans; an image is repeated
    merge: int
    theta: float
    gated: bool
    window: int | None = None
    full: tuple[int, ...] = ()
    tokens_per_second: float | None = None
    whole_seconds: bool = False

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return 3 * self.frames * self.patch_size**2

    @classmethod
    def from_hf(cls, family: str, raw: Mapping[str, Any]) -> QwenVisionConfig:
        """Reads the `vision_config` of a qwen2_vl or qwen2_5_vl `config.json`."""
        c = {**_DEFAULTS[family], **{key: value for key, value in raw.items() if value is not None}}
        require("vision_config.hidden_act", c["hidden_act"], _DEFAULTS[family]["hidden_act"])
        for field in ("in_channels", "in_chans"):  # version 4 wrote the second
            require(f"vision_config.{field}", c.get(field, 3), 3)
        rope = c.get("rope_parameters") or {}
        require("vision_config.rope_parameters.rope_type", rope.get("rope_type", "axial"), "axial")
        for field in _COUNTS:
            positive(f"vision_config.{field}", c[field])
        own = _qwen2_vl(c) if family == "qwen2_vl" else _qwen2_5_vl(c)
        if own["width"] % (4 * c["num_heads"]):
            raise InputError(f"config.json: vision_config: {c['num_heads']} heads must share {own['width']} channels "
                             "evenly, four or a multiple of it each")  # fmt: skip
        return cls(
            layers=c["depth"],
            heads=c["num_heads"],
            patch_size=c["patch_size"],
            frames=c["temporal_patch_size"],
            merge=c["spatial_merge_size"],
            theta=float(rope.get("rope_theta", 1e4)),
            **own,
        )


def _qwen2_vl(c: Mapping[str, Any]) -> dict[str, Any]:
    width = positive("vision_config.embed_dim", c["embed_dim"])
    out_width = positive("vision_config.hidden_size", c["hidden_size"])  # sic: the decoder's
    return dict(width=width, mlp_width=int(width * c["mlp_ratio"]), out_width=out_width, gated=False)


def _qwen2_5_vl(c: Mapping[str, Any]) -> dict[str, Any]:
    side = c["patch_size"] * c["spatial_merge_size"]  # pixels
    if positive("vision_config.window_size", c["window_size"]) % side:
        raise InputError(f"config.json: vision_config.window_size={c['window_size']} must be a multiple of {side}")
    full = tuple(c["fullatt_block_indexes"])
    if not all(isinstance(block, int) and block >= 0 for block in full):
        raise InputError(f"config.json: vision_config.fullatt_block_indexes={full!r} must be numbers of blocks")
    return dict(
        width=positive("vision_config.hidden_size", c["hidden_size"]),
        mlp_width=positive("vision_config.intermediate_size", c["intermediate_size"]),
        out_width=positive("vision_config.out_hidden_size", c["out_hidden_size"]),
        gated=True, window=c["window_size"] // side, full=full, tokens_per_second=float(c["tokens_per_second"]),
    )  # fmt: skip
