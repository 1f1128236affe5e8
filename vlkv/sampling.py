"""How the next token is chosen. Static, like a policy: jit traces once per setting."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vlkv.errors import InputError


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy:
    """The most likely token.

    Attributes:
        max_new_tokens: the longest answer; also the slots of the cache's tail.
        stop: ids that end a row; None: the checkpoint's own.
    """

    max_new_tokens: int = 64
    stop: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.max_new_tokens, int) and self.max_new_tokens >= 1):
            raise InputError(f"max_new_tokens={self.max_new_tokens!r} must be a whole number of at least 1")

    def require_key(self, key: Key[Array, ""] | None) -> Key[Array, ""] | None:
        """The key; InputError if the choice is random and there is none."""
        return key

    def choose(self, logits: Float[Array, "B vocab"], key: Key[Array, ""] | None) -> Int[Array, " B"]:
        """The next token of every row."""
        del key
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Greedy):
    """A draw from the distribution, cut to the `top_k` likeliest tokens and to the nucleus of mass `top_p`.

    Attributes:
        temperature: divides the logits.
        top_k: None keeps all tokens.
        top_p: the smallest set of likeliest tokens whose mass reaches it (Holtzman et al. 2020); 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise InputError(f"temperature={self.temperature!r} must be positive; for no randomness use Greedy")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k={self.top_k!r} must be at least 1")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p!r} must lie in (0, 1]")

    def require_key(self, key: Key[Array, ""] | None) -> Key[Array, ""]:
        """The key; InputError if there is none."""
        if key is None:
            raise InputError("sampling draws at random: pass key=jax.random.key(seed)")
        return key

    def choose(self, logits: Float[Array, "B vocab"], key: Key[Array, ""] | None) -> Int[Array, " B"]:
        """The next token of every row; order: temperature, top-k, top-p, as transformers does."""
        key = self.require_key(key)
        logits = logits / self.temperature
        if self.top_k is not None:
            least = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][..., -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p < 1:
            ordered = -jnp.sort(-logits, axis=-1)
            mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
            inside = jnp.sum(mass < self.top_p, axis=-1, keepdims=True)  # index of the last token needed
            logits = jnp.where(logits < jnp.take_along_axis(ordered, inside, axis=-1), -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
