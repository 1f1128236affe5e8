"""Reads the rotary position embedding of a `config.json`: the divisor of each channel pair's frequency, and a factor.

The kinds and their defaults are those of transformers (`modeling_rope_utils`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from vlkv.config import Raw, RopeConfig, number, positive, require
from vlkv.errors import InputError

Pairs = Float[np.ndarray, " pairs"]


def read_rope(
    c: Raw, head_dim: int, *, interleaved: bool = False, partial: bool = False, neighbours: bool = False
) -> RopeConfig:
    """Reads a decoder's config, in the old form (`rope_theta`, `rope_scaling`) or the new one (`rope_parameters`).

    `interleaved`: the decoder's M-RoPE is interleaved. `partial`: only a part of the channels may be rotated.
    `neighbours`: as in RopeConfig. Raises InputError for an unsupported kind of scaling or field, and for an impossible
    number.
    """
    for field in ("rope_scaling", "rope_parameters"):
        if not isinstance(c.get(field), Mapping | None):
            raise InputError(f"config.json: {field}={c[field]!r} must be an object")
    raw = dict(c.get("rope_scaling") or c.get("rope_parameters") or {})
    kinds = [kind for kind in (raw.pop("rope_type", None), raw.pop("type", None)) if kind is not None]
    kind = kinds[0] if kinds else "default"
    if kind not in list(_KINDS):  # a list, because the value may be of a type that cannot be hashed
        raise InputError(f"config.json: rope type={kind!r} is not supported (only {', '.join(_KINDS)})")
    field = "partial_rotary_factor"
    factor = number(f"rope_parameters.{field}", raw.pop(field, c.get(field, 1.0)))
    if kind == _PROPORTIONAL:
        raw, factor = {**raw, field: factor}, 1.0
    channels = int(head_dim * factor) if partial else head_dim
    if factor != 1 and not partial:
        require(f"rope_parameters.{field}", factor, 1.0)
    if not 2 <= channels <= head_dim or channels % 2:
        raise InputError(f"config.json: rope_parameters.{field}={factor:g} rotates {channels} of {head_dim} channels; "
                         "they must be even")  # fmt: skip
    length_field, limit = "original_max_position_embeddings", c["max_position_embeddings"]
    lengths = [length for length in (c.get(length_field), raw.pop(length_field, None)) if length is not None]
    numbers = _Numbers(raw, positive(length_field, lengths[0]) if lengths else limit, limit)
    theta = numbers.take("rope_theta", number("rope_theta", c.get("rope_theta", 10000.0), above=1), above=1)
    axes = _axes(raw, channels, interleaved=interleaved, needed="mrope" in kinds)
    if axes is not None and kind in _BY_LENGTH:
        raise InputError(f"config.json: rope type={kind!r} is not supported with mrope_section, because positions of "
                         "images are not lengths (only default, linear, llama3, yarn)")  # fmt: skip
    scaling = _KINDS[kind](numbers, theta ** -(np.arange(channels // 2) / (channels // 2)))
    for field in raw:  # what no kind of scaling has taken
        raise InputError(f"config.json: rope_parameters.{field} is not supported")
    return RopeConfig(theta=theta, axes=axes, channels=None if channels == head_dim else channels,
                      neighbours=neighbours, **scaling)  # fmt: skip


def _axes(raw: dict[str, Any], channels: int, *, interleaved: bool, needed: bool) -> tuple[int, ...] | None:
    """The position axis of each channel pair; None without M-RoPE.

    In blocks, the first pairs use the time, the next ones the line, and the last ones the column. Interleaved, the
    pairs use time, line, column, time, line, column and so on; the line and the column stop after their numbers of
    pairs, and the time has the rest.
    """
    sections, field = raw.pop("mrope_section", None), "mrope_interleaved"
    require(f"rope_parameters.{field}", raw.pop(field, interleaved), interleaved)
    if sections is None and needed:
        raise InputError("config.json: rope_parameters.mrope_section is missing")
    if sections is None:
        return None
    are_counts = isinstance(sections, list | tuple) and all(isinstance(x, int) and x >= 0 for x in sections)
    if not are_counts or len(sections) != 3 or sum(sections) != channels // 2:
        raise InputError(f"config.json: rope_parameters.mrope_section={sections!r} must be three whole numbers that "
                         f"add up to half of {channels} channels")  # fmt: skip
    if not interleaved:
        return tuple(int(axis) for axis in np.repeat(np.arange(3), sections))
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(channels // 2))


class _Numbers:
    """The numbers of one kind of scaling. Each is removed from `raw`, so the fields that remain are not supported."""

    def __init__(self, raw: dict[str, Any], original: int, limit: int) -> None:
        # `original` and `limit`: the number of positions in the first training, and of the model.
        self.raw, self.original, self.limit = raw, original, limit

    def take(
        self, field: str, default: float | None = None, *, above: float = 0, missing: tuple[Any, ...] = (None,)
    ) -> float:
        """A number above `above`; the default if the field is missing or has one of the values `missing`."""
        value = self.raw.pop(field, None)
        if default is not None and value in missing:
            return default
        return number(f"rope_parameters.{field}", value, above=above)

    def take_pairs(self, field: str, pairs: int) -> tuple[float, ...]:
        """A list with a positive number for each channel pair."""
        factors = self.raw.pop(field, None)
        if not isinstance(factors, list):
            raise InputError(f"config.json: rope_parameters.{field} must be a list of {pairs} numbers")
        if len(factors) != pairs:
            raise InputError(f"config.json: rope_parameters.{field} has {len(factors)} numbers, "
                             f"{2 * pairs} channels need {pairs}")  # fmt: skip
        return tuple(number(f"rope_parameters.{field}[{i}]", x) for i, x in enumerate(factors))


def _default(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    numbers.raw.pop("factor", None)  # Qwen2-VL's folders contain it, and transformers ignores it
    return {}


def _dynamic(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    """Changes only prompts beyond the model's limit, which raise an error anyway."""
    numbers.take("factor", 1.0)
    return {}


def _linear(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    return {"divisors": (numbers.take("factor"),) * len(frequency)}


def _proportional(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    """Gemma 4: only the first pairs are rotated, at the frequencies that they have if all are."""
    pairs = len(frequency)
    share, factor = numbers.take("partial_rotary_factor"), numbers.take("factor", 1.0)
    rotated = int(share * pairs)
    if rotated > pairs:
        raise InputError(f"config.json: rope_parameters.partial_rotary_factor={share:g} must be at most 1")
    return {"divisors": (factor,) * rotated + (math.inf,) * (pairs - rotated)}


def _llama3(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    """Llama 3.1: long waves are divided by the factor, short ones are kept, and those between are interpolated."""
    factor, low, high = (numbers.take(f) for f in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise InputError(f"config.json: rope_parameters.high_freq_factor={high:g} must be larger than "
                         f"low_freq_factor={low:g}")  # fmt: skip
    waves = numbers.original * frequency / (2 * np.pi)  # in the first training
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return {"divisors": _divisors((1 - kept) / factor + kept)}


def _yarn(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    """YaRN (Peng et al. 2023, Sec. 3.2): a ramp over channel pairs; cosines and sines are scaled too."""
    pairs = len(frequency)
    factor = numbers.take("factor", numbers.limit / numbers.original)
    unset = (None, 0)  # transformers replaces 0 by the default too
    fast, slow = numbers.take("beta_fast", 32, missing=unset), numbers.take("beta_slow", 1, missing=unset)

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    mscale, all_dims = (numbers.take(f, 0.0, missing=unset) for f in ("mscale", "mscale_all_dim"))
    attention = numbers.take("attention_factor", scale(mscale) / scale(all_dims) if mscale and all_dims else scale(1))
    base = frequency[1] ** -pairs if pairs > 1 else math.e  # theta

    def pair_of(rotations: float) -> float:
        """The channel pair that rotates this often in the first training."""
        return pairs * math.log(numbers.original / (rotations * 2 * math.pi)) / math.log(base)

    low, high = pair_of(fast), pair_of(slow)
    truncate = numbers.raw.pop("truncate", True)
    require("rope_parameters.truncate", truncate, True, False, None)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)
    return {"divisors": _divisors(ramp / factor + 1 - ramp), "scale": attention}


def _longrope(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    """Long-RoPE (Phi-3): two lists of divisors, for short and for long sequences; cosines and sines are scaled too."""
    short, long = (numbers.take_pairs(f"{name}_factor", len(frequency)) for name in ("short", "long"))
    number("original_max_position_embeddings", numbers.original, above=1)
    stretch = numbers.take("factor", numbers.limit / numbers.original)
    scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(numbers.original))
    return {"divisors": short, "long": long, "original": numbers.original,
            "scale": numbers.take("attention_factor", scale)}  # fmt: skip


def _divisors(scale: Pairs) -> tuple[float, ...]:
    return tuple(map(float, 1 / scale))


_PROPORTIONAL = "proportional"
_KINDS: dict[str, Callable[[_Numbers, Pairs], dict[str, Any]]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope, "su": _longrope, "mrope": _default, _PROPORTIONAL: _proportional,
}  # fmt: skip
_BY_LENGTH = ("dynamic", "longrope", "su")  # the frequencies depend on the length of the sequence
