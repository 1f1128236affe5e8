"""Lets the model read its prompt twice in one pass, for methods that observe the second reading (`Stages.repeats`).

The row of the prompt is followed by the ids of an instruction and by the same prompt again, with positions that
continue. Attention is causal, so the first reading is not affected; only its tokens are cached.

Axes: B batch · T tokens of the prompt · R tokens of instruction and repetition · E = T + R · D model width ·
N query heads · K key heads · H head dim · A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression.observe import Repeated
from vlkv.compression.tokens import Tokens
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.masks import end_of


class Repetition(NamedTuple):
    """The tokens after the prompt."""

    positions: Int[Array, "B E A"]  # those of the prompt too
    valid: Bool[Array, "B R"]
    instruction: tuple[int, ...]

    def of(
        self, attention: Any, q: Float[Array, "B E N H"], k: Float[Array, "B E K H"], v: Float[Array, "B E K H"]
    ) -> tuple[Callable[..., Any], tuple[Array, Array, Array, Repeated]]:
        """Attention of the whole row; queries, keys and values of the prompt; and the queries after it."""
        length = q.shape[1] - self.valid.shape[1]
        repeated = Repeated(q=jnp.swapaxes(q[:, length:], 1, 2), instruction=self.instruction)
        return partial(self.attend, attention), (q[:, :length], k[:, :length], v[:, :length], repeated)

    def attend(
        self,
        attention: Callable[..., Any],
        *qkv: Array,
        valid: Bool[Array, "B T"],
        until: Int[Array, "B T"] | None,
        window: int | None = None,
        row_weight: Float[Array, "B W T"] | None = None,
        **options: Any,
    ) -> Any:
        """Attention of the whole row. `valid` and `until` are the prompt's; repeated images are read like text."""
        valid = jnp.concatenate([valid, self.valid], axis=1)
        if until is not None:
            itself = jnp.broadcast_to(jnp.arange(until.shape[1], valid.shape[1]), self.valid.shape)
            until = jnp.concatenate([until, itself], axis=1)
        if window is None:
            if row_weight is not None:
                options["row_weight"] = jnp.pad(row_weight, [(0, 0), (0, 0), (0, self.valid.shape[1])])
            return attention(*qkv, valid=valid, until=until, **options)
        # A window counts indices, so the valid tokens must be side by side, without the padding after the prompt.
        order = jnp.argsort(~valid, axis=1, stable=True)
        place_in_order = jnp.argsort(order, axis=1)
        until = None if until is None else _take(jnp.take_along_axis(place_in_order, until, axis=1), order)
        attended = attention(
            *(_take(x, order) for x in qkv), valid=_take(valid, order), until=until, window=window, **options
        )
        return _take(attended, place_in_order)


def _take(x: Array, order: Int[Array, "B E"]) -> Array:
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)


def repeat(params: Model, tokens: Tokens, instruction: tuple[int, ...]) -> tuple[Tokens, Repetition]:
    """The tokens with hidden states of the whole row, and what follows the prompt.

    Raises:
        InputError: an id of the instruction is outside the vocabulary.
    """
    vocabulary = params.config.decoder.vocab_size
    if max(instruction, default=0) >= vocabulary:
        raise InputError(
            f"the instruction before a repetition has the id {max(instruction)}, but the vocabulary has "
            f"{vocabulary} tokens: encode it with this model's tokenizer"
        )
    batch, count = len(tokens.valid), len(instruction)
    begin = end_of(tokens.positions, tokens.valid)[:, None, None]
    offsets = jnp.broadcast_to(jnp.arange(count)[:, None], (batch, count, tokens.positions.shape[2]))
    positions = jnp.concatenate([tokens.positions, begin + offsets, begin + count + tokens.positions], axis=1)
    valid = jnp.concatenate([jnp.ones((batch, count), bool), tokens.valid], axis=1)
    ids = jnp.broadcast_to(jnp.array(instruction, jnp.int32), (batch, count))
    between = params.decoder.embedding(ids).astype(tokens.x.dtype)
    added = tokens.added
    if added is not None:
        zeros = jnp.zeros((*added.shape[:2], count, added.shape[3]), added.dtype)
        vectors = params.decoder.inputs_of_layers(ids, between)
        added = jnp.concatenate([added, zeros if vectors is None else vectors, added], axis=2)
    x = jnp.concatenate([tokens.x, between, tokens.x], axis=1)
    return dataclasses.replace(tokens, x=x, added=added), Repetition(positions, valid, instruction)
