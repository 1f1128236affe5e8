"""Reads the rotary position embedding of a `config.json`: the divisor of each channel pair's frequency, and a factor.

The kinds and their defaults are those of transformers (`modeling_rope_utils`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from vlkv.config import Raw, RopeConfig, require
from vlkv.errors import InputError

Pairs = Float[np.ndarray, " pairs"]


def read_rope(c: Raw, head_dim: int) -> RopeConfig:
    """Reads a decoder's config, in the old form (`rope_theta`, `rope_scaling`) or the new one (`rope_parameters`).

    Raises:
        InputError: an unsupported kind of scaling, a missing number, or an unsupported field.
    """
    raw = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
    kind = raw.pop("rope_type", None) or raw.get("type") or "default"
    raw.pop("type", None)
    kind = {"mrope": "default", "su": "longrope"}.get(kind, kind)
    if kind not in _KINDS:
        raise InputError(f"config.json: rope type={kind!r} is not supported (only {', '.join(_KINDS)}, mrope)")
    require("rope_parameters.partial_rotary_factor", raw.pop("partial_rotary_factor", 1.0), 1.0)
    theta = float(raw.pop("rope_theta", None) or c.get("rope_theta", 10000.0))
    made: dict[str, Any] = {"theta": theta, "sections": _sections(raw, c, head_dim)}
    original = c.get("original_max_position_embeddings") or raw.pop("original_max_position_embeddings", None)
    raw.pop("original_max_position_embeddings", None)
    numbers = _Numbers(raw, original or c["max_position_embeddings"], c["max_position_embeddings"])
    frequency = theta ** -(np.arange(head_dim // 2) / (head_dim // 2))
    made |= _KINDS[kind](numbers, frequency)
    for field in raw:
        raise InputError(f"config.json: rope_parameters.{field} is not supported")
    return RopeConfig(**made)


def _sections(raw: dict[str, Any], c: Raw, head_dim: int) -> tuple[int, ...] | None:
    """The channel pairs per position axis of M-RoPE; None if there is one axis."""
    sections = raw.pop("mrope_section", None)
    old = (c.get("rope_parameters") or c.get("rope_scaling") or {}).get
    if sections is None and "mrope" in (old("rope_type"), old("type")):
        raise InputError("config.json: rope_parameters.mrope_section is missing")
    if sections is not None and sum(sections) != head_dim // 2:
        raise InputError(f"config.json: rope_parameters.mrope_section={sections!r} must add up to half of "
                         f"{head_dim} channels")  # fmt: skip
    return None if sections is None else tuple(sections)


class _Numbers:
    """The numbers of one kind of scaling; each is taken from `raw` once.

    Attributes:
        raw: the fields that have not been taken.
        original: number of positions in the first training.
        limit: number of positions of the model.
    """

    def __init__(self, raw: dict[str, Any], original: int, limit: int) -> None:
        self.raw, self.original, self.limit = raw, original, limit

    def take(self, field: str, default: float | None = None) -> float:
        """A field, or its default if it is missing or null; raises InputError unless it is a positive number."""
        value = self.raw.pop(field, None)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise InputError(f"config.json: rope_parameters.{field}={value!r} must be a positive number")
        return float(value)

    def take_pairs(self, field: str, pairs: int) -> tuple[float, ...]:
        """A list with a number for each channel pair."""
        given = self.raw.pop(field, None)
        if not isinstance(given, list) or not all(isinstance(x, int | float) for x in given):
            raise InputError(f"config.json: rope_parameters.{field} must be a list of {pairs} numbers")
        if len(given) != pairs:
            raise InputError(f"config.json: rope_scaling.{field} has {len(given)} numbers, "
                             f"{2 * pairs} channels need {pairs}")  # fmt: skip
        return tuple(map(float, given))


def _default(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    del frequency
    numbers.raw.pop("factor", None)  # Qwen2-VL's folders contain it, and transformers ignores it
    return {}


def _dynamic(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    """Changes only prompts beyond the model's limit, which raise an error anyway."""
    del frequency
    numbers.raw.pop("factor", None)
    return {}


def _linear(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    return {"divisors": (numbers.take("factor"),) * len(frequency)}


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
    raw, pairs = numbers.raw, len(frequency)
    factor = numbers.take("factor", numbers.limit / numbers.original)
    fast, slow = numbers.take("beta_fast", 32), numbers.take("beta_slow", 1)

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    own, every, given = (raw.pop(f, None) for f in ("mscale", "mscale_all_dim", "attention_factor"))
    attention = given if given is not None else scale(own) / scale(every) if own and every else scale(1)
    base = frequency[1] ** -pairs if pairs > 1 else math.e  # theta

    def pair_of(rotations: float) -> float:
        """The channel pair that rotates this often in the first training."""
        return pairs * math.log(numbers.original / (rotations * 2 * math.pi)) / math.log(base)

    low, high = pair_of(fast), pair_of(slow)
    if raw.pop("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)
    return {"divisors": _divisors(ramp / factor + 1 - ramp), "scale": float(attention)}


def _longrope(numbers: _Numbers, frequency: Pairs) -> dict[str, Any]:
    """Long-RoPE (Phi-3): two lists of divisors, for short and for long sequences; cosines and sines are scaled too."""
    short, long = (numbers.take_pairs(f"{name}_factor", len(frequency)) for name in ("short", "long"))
    stretch = numbers.take("factor", numbers.limit / numbers.original)
    scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(numbers.original))
    return {"divisors": short, "long": long, "original": numbers.original,
            "scale": numbers.take("attention_factor", scale)}  # fmt: skip


def _divisors(scale: Pairs) -> tuple[float, ...]:
    return tuple(map(float, 1 / scale))


_KINDS: dict[str, Callable[[_Numbers, Pairs], dict[str, Any]]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope,
}  # fmt: skip
