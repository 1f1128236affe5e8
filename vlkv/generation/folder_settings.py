"""What a checkpoint's `generation_config.json` asks for: `default_sampling`, and a warning about what is not used."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from vlkv.config import ModelConfig
from vlkv.errors import InputError, shortened
from vlkv.families import GENERATION, Model
from vlkv.generation.rules import LogitRules
from vlkv.generation.sampling import Greedy, Sample

_CHOICE = ("temperature", "top_k", "top_p")
_ONLY_SAMPLING = (*_CHOICE, "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def default_sampling(params: Model, *, max_new_tokens: int | None = None) -> Greedy:
    """The choice of tokens that `generation_config.json` asks for: `Sample` if `do_sample` is true, else `Greedy`.

    Their `rules` are those of the file, as in every `Greedy` and `Sample` without rules of its own. A missing `top_k`
    is 50, as in transformers.

    Args:
        params: from `load` or `load_params`.
        max_new_tokens: greatest length of an answer; None: that of the file, else 64.

    Raises:
        InputError: a value that `Greedy` or `Sample` refuses.
    """
    settings = dict(params.config.generation)
    length = settings.get("max_new_tokens", Greedy().max_new_tokens) if max_new_tokens is None else max_new_tokens
    chosen: dict[str, Any] = {name: settings.get(name, GENERATION[name]) for name in _CHOICE}
    chosen["top_k"] = chosen["top_k"] or None  # 0: all
    try:
        if not settings.get("do_sample"):
            return Greedy(max_new_tokens=length)
        return Sample(max_new_tokens=length, **chosen)
    except InputError as error:
        raise InputError(f"generation_config.json: {error}") from None


def check_settings(config: ModelConfig) -> None:
    """Warns, in one line, of settings that change the answers of transformers and not those of `Greedy`.

    Raises:
        InputError: a rule has a wrong value.
    """
    settings = dict(config.generation)
    LogitRules.of(settings)
    rules = [field.name for field in dataclasses.fields(LogitRules)]
    drawn = settings if settings.get("do_sample") else {}
    asked = {name: drawn[name] for name in ("do_sample", *_CHOICE) if name in drawn}
    asked |= {name: settings[name] for name in ("max_new_tokens",) if name in settings}
    idle = {*rules, *asked, *(() if drawn else _ONLY_SAMPLING)}
    ignored = {name: value for name, value in settings.items() if name not in idle}
    if isinstance(most := ignored.get("max_length"), int) and most >= config.decoder.max_positions:
        del ignored["max_length"]  # the model's own limit
    parts = [
        f"{_listed(ignored)} not used" if ignored else "",
        f"{_listed(asked)} used only with sampling=vlkv.default_sampling(params)" if asked else "",
    ]
    if any(parts):
        warnings.warn(shortened("generation_config.json: " + "; ".join(filter(None, parts))), stacklevel=3)


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
