"""Choice of the next token. The settings are static, like a policy: jit compiles once for each setting."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key
from typing_extensions import override

from pallas_kernels.cpu import argmax
from vlkv.cache import history
from vlkv.compression.option_types import Positive, Share, use_python_numbers, wrong_option
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.generation.rules import LogitRules, token_ids
from vlkv.inputs import Inputs

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
    return history.append(jnp.full(inputs.valid.shape, -1), token_ids(config, inputs), jnp.asarray(inputs.valid))
