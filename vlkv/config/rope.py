"""How positions turn channels: theta, and what stretches or shares it out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import require
from vlkv.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one decoder; channels are counted in pairs, H/2 of them.

    Attributes:
        theta: base of the frequencies.
        sections: M-RoPE: how many channel pairs turn by each position axis (time, line, column); None: one axis.
        short: long-RoPE: divisors of the frequencies, a channel pair each; None: no scaling.
        long: the same for prompts longer than `original`.
        original: positions that the model was first trained on.
        scale: long-RoPE: factor of cosine and sine.
    """

    theta: float = 1e4
    sections: tuple[int, ...] | None = None
    short: tuple[float, ...] | None = None
    long: tuple[float, ...] | None = None
    original: int = 0
    scale: float = 1.0

    @classmethod
    def from_hf(cls, c: Mapping[str, Any], head_dim: int) -> RopeConfig:
        """From a decoder's config, old style (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

        Raises:
            InputError: a kind of scaling, or a field of it, that we do not honour.
        """
        raw = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
        kind = raw.pop("rope_type", None) or raw.get("type", "default")
        raw.pop("type", None)
        require("rope_parameters.partial_rotary_factor", raw.pop("partial_rotary_factor", 1.0), 1.0)
        theta = float(raw.pop("rope_theta", None) or c.get("rope_theta", 10000.0))
        if kind in ("default", "mrope"):
            sections = raw.pop("mrope_section", None)
            for field in ("factor", "original_max_position_embeddings"):
                raw.pop(field, None)
            _nothing_left(raw)
            if kind == "mrope" and sections is None:
                raise InputError("config.json: rope_parameters.mrope_section is missing")
            if sections is not None and sum(sections) != head_dim // 2:
                raise InputError(f"config.json: rope_parameters.mrope_section={sections!r} must add up to half of "
                                 f"{head_dim} channels")  # fmt: skip
            return cls(theta=theta, sections=None if sections is None else tuple(sections))
        if kind in ("longrope", "su"):
            return cls(theta=theta, **_long(raw, c, head_dim))
        if kind == "dynamic":  # acts on prompts beyond the model's limit only, and those are refused
            raw.pop("factor", None)
            _nothing_left(raw)
            return cls(theta=theta)
        raise InputError(f"config.json: rope type={kind!r} is not supported (only default, mrope, longrope, dynamic)")


def _long(raw: dict[str, Any], c: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    short, long = (tuple(float(x) for x in raw.pop(f"{name}_factor")) for name in ("short", "long"))
    limit = c["max_position_embeddings"]
    original = raw.pop("original_max_position_embeddings", None) or c.get("original_max_position_embeddings") or limit
    stretch = limit / original
    scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    scale = raw.pop("attention_factor", None) or scale
    raw.pop("factor", None)
    _nothing_left(raw)
    for name, factors in (("short", short), ("long", long)):
        if len(factors) != head_dim // 2:
            raise InputError(f"config.json: rope_scaling.{name}_factor has {len(factors)} numbers, "
                             f"{head_dim} channels need {head_dim // 2}")  # fmt: skip
    return {"short": short, "long": long, "original": original, "scale": scale}


def _nothing_left(raw: Mapping[str, Any]) -> None:
    for field in raw:
        raise InputError(f"config.json: rope_parameters.{field} is not supported")
