"""Choice of the next token, and what a checkpoint's `generation_config.json` asks for.

The settings are static, like a policy: jit compiles once for each setting.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key
from typing_extensions import override

from pallas_kernels.cpu import argmax
from vlkv.compression.option_types import Positive, Share, use_python_numbers, wrong_option
from vlkv.config import ModelConfig
from vlkv.errors import InputError, shortened
from vlkv.families import GENERATION, Model
from vlkv.generation.rules import LogitRules, add_ids, token_ids
from vlkv.inputs import Inputs

_CHOICE = ("temperature", "top_k", "top_p")
_ONLY_SAMPLING = (*_CHOICE, "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_COLDEST = 1e-30  # float32 cannot divide by much less; here only the most likely tokens have a probability already


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy:
    """The most likely token.

    Attributes:
        max_new_tokens: greatest length of an answer, and capacity of the cache for new tokens.
        stop: ids that end a row; None: those of the checkpoint.
        rules: what changes the logits before the choice, such as a repetition penalty; None: those of the checkpoint's
            `generation_config.json`. `LogitRules()`: nothing.
    """

    max_new_tokens: Positive = 64
    stop: tuple[int, ...] | None = None
    rules: LogitRules | None = None

    def __post_init__(self) -> None:
        use_python_numbers(self)
        if (wrong := wrong_option(self)) is not None:
            raise InputError(f"{wrong[0]}={getattr(self, wrong[0])!r} {wrong[1]}")

    def filled(self, config: ModelConfig) -> Greedy:
        """With the checkpoint's `stop` and `rules` in place of None."""
        return dataclasses.replace(
            self,
            stop=config.stop if self.stop is None else self.stop,
            rules=LogitRules.of(dict(config.generation)) if self.rules is None else self.rules,
        )

    def require_key(self, key: Key[Array, ""] | None) -> Key[Array, ""] | None:
        """Returns the key; raises InputError if the choice is random and the key is None."""
        return key

    def choose(self, logits: Float[Array, "B vocab"], key: Key[Array, ""] | None) -> Int[Array, " B"]:
        """The next token of every row."""
        return argmax(logits)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Greedy):
    """A random token, drawn from the `top_k` most likely tokens and the nucleus of probability `top_p`.

    Attributes:
        temperature: divides the logits.
        top_k: number of most likely tokens; None: all.
        top_p: draw from the smallest set of most likely tokens with this probability (Holtzman et al. 2020); 1: all.
    """

    temperature: float = 1.0
    top_k: Positive | None = None
    top_p: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise InputError(f"temperature={self.temperature!r} must be positive; without randomness, use Greedy")

    @override
    def require_key(self, key: Key[Array, ""] | None) -> Key[Array, ""]:
        if key is None:
            raise InputError("sampling draws at random: pass key=jax.random.key(seed)")
        return key

    def choose(self, logits: Float[Array, "B vocab"], key: Key[Array, ""] | None) -> Int[Array, " B"]:
        """The next token of every row. Temperature, top-k and top-p are applied in this order, as in transformers."""
        key = self.require_key(key)
        # After the subtraction, no quotient is infinite or NaN, however small or large the temperature is.
        temperature = min(max(self.temperature, _COLDEST), 1 / _COLDEST)
        logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
        if self.top_k is not None:
            least = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][..., -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p < 1:
            ordered = -jnp.sort(-logits, axis=-1)
            mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
            inside = jnp.sum(mass < self.top_p, axis=-1, keepdims=True)  # index of the last token of the nucleus
            logits = jnp.where(logits < jnp.take_along_axis(ordered, inside, axis=-1), -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def begin_history(config: ModelConfig, inputs: Inputs, sampling: Greedy | None) -> Int[Array, "B T"] | None:
    """The ids of a prompt for `PackedCache.history`; None if no rule of `sampling` or of the checkpoint reads them."""
    rules = (sampling or Greedy()).filled(config).rules
    if rules is None or not rules.reads_history:
        return None
    ids = token_ids(config, inputs)
    return add_ids(jnp.full(inputs.valid.shape, -1), ids, jnp.asarray(inputs.valid))


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
