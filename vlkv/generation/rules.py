"""Rules that change the logits before a token is chosen: logits processors of transformers, under the same names.

Axes: B batch · S capacity of the history · T new tokens · W banned sequences of one length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression.option_types import Count, Range, use_python_numbers, wrong_option
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.inputs import Inputs

Ids = tuple[Count, ...]
Logits = Float[Array, "B vocab"]
# Ids of all tokens of each row so far, whatever the policy keeps: in order, then -1 up to the capacity S.
History = Int[Array, "B S"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitRules:
    """What `generation_config.json` can ask for besides sampling. Padding of the prompt is not counted as tokens.

    Attributes:
        repetition_penalty: divides positive logits of tokens that the prompt or the answer has, and multiplies negative
            ones (Keskar et al. 2019). Tokens of images count, as in transformers.
        no_repeat_ngram_size: no sequence of this length occurs twice; 0: no limit.
        bad_words_ids: sequences that are not completed. A stop token alone is ignored, as in transformers.
        min_new_tokens: no stop token before this number of tokens.
        forced_eos_token_id: one of them is the last token of an answer of `max_new_tokens` tokens.
        suppress_tokens: ids that are never chosen.
        begin_suppress_tokens: ids that are not chosen first.
    """

    repetition_penalty: Annotated[float, Range(0, above=True)] = 1.0
    no_repeat_ngram_size: Count = 0
    bad_words_ids: tuple[Ids, ...] = ()
    min_new_tokens: Count = 0
    forced_eos_token_id: Ids = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        use_python_numbers(self)
        if (wrong := wrong_option(self)) is not None:
            raise InputError(f"{wrong[0]}={getattr(self, wrong[0])!r} {wrong[1]}")
        if () in self.bad_words_ids:
            raise InputError("bad_words_ids has an empty sequence: every one needs at least one id")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> LogitRules:
        """The rules in the fields of a `generation_config.json`; raises InputError for wrong values."""
        rules = {field.name: settings[field.name] for field in dataclasses.fields(cls) if field.name in settings}
        if isinstance(end := rules.get("forced_eos_token_id"), int):
            rules["forced_eos_token_id"] = (end,)
        try:
            return cls(**rules)
        except InputError as error:
            raise InputError(f"generation_config.json: {error}") from None

    @property
    def reads_history(self) -> bool:
        """Whether the rules depend on earlier tokens, so that the cache must have their ids."""
        return self.repetition_penalty != 1 or self.no_repeat_ngram_size > 0 or any(x[1:] for x in self.bad_words_ids)

    def apply(
        self, logits: Logits, history: History | None, *, step: int | Array, last: int, stop: tuple[int, ...]
    ) -> Logits:
        """The logits from which a token is chosen, in the order of transformers. Without rules, the same array.

        `history` has the ids of prompt and answer, as in the cache. `step` is the number of tokens of the answer so
        far, and `last` that before the last one.

        Raises:
            InputError: the cache has no ids, or a banned sequence has an id outside the vocabulary.
        """
        if self.reads_history:
            if history is None:
                raise InputError(
                    "repetition_penalty, no_repeat_ngram_size and bad_words_ids need the prompt's ids: "
                    "give prefill the same sampling="
                )
            logits = _penalize(logits, history, self.repetition_penalty)
            logits = _ban_ngrams(logits, history, self.no_repeat_ngram_size)
        logits = _ban_sequences(logits, history, [x for x in self.bad_words_ids if x not in [(end,) for end in stop]])
        if self.min_new_tokens:
            logits = jnp.where(step < self.min_new_tokens, _without(logits, stop), logits)
        if self.forced_eos_token_id:
            only = jnp.full_like(logits, -jnp.inf).at[:, np.array(self.forced_eos_token_id)].set(0.0)
            logits = jnp.where(step == last, only, logits)
        logits = _without(logits, self.suppress_tokens)
        if self.begin_suppress_tokens:
            logits = jnp.where(step == 0, _without(logits, self.begin_suppress_tokens), logits)
        return logits


def token_ids(config: ModelConfig, inputs: Inputs) -> Int[Array, "B T"]:
    """The ids of a prompt as in transformers. `Inputs` has 0 in place of an image token outside the vocabulary."""
    if config.image_token is None or config.image_token < config.decoder.vocab_size:
        return jnp.asarray(inputs.tokens)
    return jnp.where(inputs.is_vision, config.image_token, inputs.tokens)


def add_ids(history: History | None, ids: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> History | None:
    """The history with further ids; `valid` is False for padding. None, without rules that read it, stays None."""
    if history is None:
        return None
    present = jnp.ones(ids.shape, bool) if valid is None else valid
    place = jnp.sum(history >= 0, axis=1, keepdims=True) + jnp.cumsum(present, axis=1) - 1
    place = jnp.where(present, place, history.shape[1])  # past the end, where nothing is written
    return history.at[jnp.arange(len(ids))[:, None], place].set(ids.astype(history.dtype), mode="drop")


def _without(logits: Logits, ids: tuple[int, ...]) -> Logits:
    return jnp.where(np.isin(np.arange(logits.shape[1]), ids), -jnp.inf, logits) if ids else logits


def _put(logits: Logits, ids: History, values: Any) -> Logits:
    """Sets the logits of these ids; -1 and ids outside the vocabulary have none."""
    place = jnp.where(ids >= 0, ids, logits.shape[1])
    return logits.at[jnp.arange(len(ids))[:, None], place].set(values, mode="drop")


def _penalize(logits: Logits, history: History, penalty: float) -> Logits:
    if penalty == 1:
        return logits
    scores = jnp.take_along_axis(logits, history, axis=1, mode="clip")
    return _put(logits, history, jnp.where(scores < 0, scores * penalty, scores / penalty))


def _ban_ngrams(logits: Logits, history: History, size: int) -> Logits:
    """Bans each id that would complete a sequence of `size` ids for the second time."""
    windows = history.shape[1] - size + 1
    if size == 0 or windows < 1:
        return logits
    end = _end(history, size - 1)
    *before, following = (history[:, i : i + windows] for i in range(size))
    again = jnp.ones(following.shape, bool)
    for i, ids in enumerate(before):
        again &= ids == end[:, i : i + 1]
    return _put(logits, jnp.where(again, following, -1), -jnp.inf)


def _ban_sequences(logits: Logits, history: History | None, sequences: list[tuple[int, ...]]) -> Logits:
    vocab = logits.shape[1]
    if (largest := max((max(sequence) for sequence in sequences), default=0)) >= vocab:
        raise InputError(f"bad_words_ids has the id {largest}, but the vocabulary has {vocab} tokens")
    for length in sorted({len(sequence) for sequence in sequences}):
        same = np.array([sequence for sequence in sequences if len(sequence) == length])  # [W, length]
        if length == 1:
            logits = _without(logits, tuple(same[:, 0].tolist()))
            continue
        assert history is not None
        completes = jnp.all(_end(history, length - 1)[:, None] == same[:, :-1], axis=2)  # [B, W]
        logits = logits.at[:, same[:, -1]].min(jnp.where(completes, -jnp.inf, jnp.inf))
    return logits


def _end(history: History, count: int) -> Int[Array, "B count"]:
    """The last `count` ids of each row, with -2, which is no id, before its first one."""
    place = jnp.sum(history >= 0, axis=1, keepdims=True) - count + jnp.arange(count)
    return jnp.where(place >= 0, jnp.take_along_axis(history, jnp.maximum(place, 0), axis=1), -2)
