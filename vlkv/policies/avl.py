from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from vlkv.cache.decode_state import DecodeState, evict, mean_over_heads
from vlkv.compression import budgets
from vlkv.compression.observe import Observation, column_sums, group_mean, head_mean, rows_mass
from vlkv.compression.option_types import Positive, Scope, Share
from vlkv.compression.policy import DecodingStages, Facts, Mask, ReducingStages, Scores, those
from vlkv.compression.tokens import Tokens
from vlkv.masks import last, top

_EARLY = 2  # layers of prefill that process the whole image


class AVL(ReducingStages, DecodingStages):
    """Stores the secondary vision tokens, attends to a core of them, and drops the others (Zhang et al. 2024).

    Vision tokens are ranked by the attention of the last prompt token, averaged over heads. The best `keep` of them are
    secondary (S), the best `core` are core (C). An ordinary step attends to the core and all text; every `refresh`-th
    step attends to all secondary tokens and chooses the core again. In a composition, in which heads may hold different
    tokens, each head takes the core of its own.

    Attributes:
        core: C, at most all of S; None: every step attends to all secondary tokens.
        refresh: K of the paper.
        text: T; if there are more than T x `longest_text` text entries, the least attended one in the older half is
            evicted; None: text is not evicted.
        longest_text: the "maximum text token length", whose value the paper does not state; None: the text of the row's
            prompt and its capacity for new tokens together.
        prefill: P, the fraction of the image's tokens that is left after the second layer; None: the prompt is not
            reduced.
    """

    scope: Scope = "vision"
    core: Share | None = 0.3
    refresh: Positive = 3
    text: Share | None = None
    longest_text: Positive | None = None
    prefill: Share | None = None
    facts = Facts(stages="reduce, score, step")
    counts_dropped = True
    drops_early_layers = True
    idle = property(lambda self: those(reduce=self.prefill is None, step=self.core is None and self.text is None))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("scope", self.scope == "vision", 'must be "vision": text has its own window')
        fits = self.prefill is None or self.keep is None or self.keep <= self.prefill
        self.check("prefill", fits, f"must not be less than keep={self.keep!r}: dropped tokens cannot be kept")

    def score(self, obs: Observation) -> Scores:
        return head_mean(rows_mass(obs, last(obs.valid, 1), 1), obs.k.shape[0])

    def reductions(self, layers: int) -> tuple[int, ...]:
        return (_EARLY,)

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        assert obs is not None
        vision = tokens.valid & tokens.is_vision
        count = jnp.asarray(self.going_on(vision.shape[0]))[jnp.sum(vision)]
        return tokens, (tokens.valid & ~tokens.is_vision) | top(self.score(obs)[:1], vision, count[None])[0]

    def going_on(self, most: int) -> Int[np.ndarray, " counts"]:
        """Table of the vision tokens left after the reduction: P times each number 0..most, rounded half up."""
        return budgets.fraction(self.prefill, most)

    @override
    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        return int(self.going_on(vision)[-1])

    def decode_slots(self, state: DecodeState) -> Int[Array, " K"]:
        """The secondary tokens, the text window if there may be so much text, and one new entry."""
        secondary = jnp.sum(state.stored & ~state.is_text, axis=-1, dtype=jnp.int32)
        return secondary + jnp.minimum(self.window(state), state.text + state.new_tokens) + 1

    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int] | None:
        if self.text is None:
            return None
        # `kept` and `longest` include the text of the prompt; the window replaces it. One slot is for the new entry.
        most = text + new_tokens
        growth = min(most, math.ceil(self.text * (self.longest_text or most))) + 1 - text
        return kept + layers * growth, longest + growth

    def decode_values(self, obs: Observation, scores: Scores) -> dict[str, Scores]:
        values = {"score": scores}
        if self.text is not None:
            values["mass"] = head_mean(column_sums(obs), obs.k.shape[0])
        return values

    def begin(self, state: DecodeState) -> DecodeState:
        state = self.shorten_text(state)
        core = None if self.core is None else self.pick(state, state.values["score"])
        values = {name: value for name, value in state.values.items() if name != "score"}  # only needed here
        return self.prepare(dataclasses.replace(state, values=values, core=core))

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        shares = mean_over_heads(state, group_mean(mass, state.stored.shape[0]))
        values = dict(state.values)
        if self.text is not None:
            values["mass"] = values["mass"] + shares
        core = state.core
        if core is not None:
            core = jnp.where(state.steps % self.refresh == 0, self.pick(state, shares), core)
        return self.prepare(self.shorten_text(dataclasses.replace(state, values=values, core=core)))

    def pick(self, state: DecodeState, shares: Float[Array, "K E"]) -> Bool[Array, "K E"]:
        """The core: the best secondary tokens, C times as many as the image has had tokens; ties: the earlier token."""
        secondary = state.stored & ~state.is_text
        assert self.core is not None
        count = jnp.maximum(budgets.unbounded_share(self.core, state.counted), 1)
        return top(shares, secondary, jnp.broadcast_to(count, secondary.shape[:1]), state.place)

    def prepare(self, state: DecodeState) -> DecodeState:
        """Sets the entries that the next step attends to: all stored ones in a refresh step, else core and text."""
        if state.core is None:
            return dataclasses.replace(state, attended=state.stored)
        refresh = (state.steps + 1) % self.refresh == 0
        attended = state.stored & (state.is_text | refresh | state.core)
        return dataclasses.replace(state, attended=attended, core_only=~refresh)

    def shorten_text(self, state: DecodeState) -> DecodeState:
        """Evicts text entries until their number is within the window."""
        if self.text is None:
            return state
        capacity = self.window(state)

        def texts(state: DecodeState) -> Bool[Array, "K E"]:
            return state.stored & state.is_text

        def over(state: DecodeState) -> Bool[Array, ""]:
            return jnp.any(jnp.sum(texts(state), axis=-1) > capacity)

        def drop(state: DecodeState) -> DecodeState:
            text = texts(state)
            count = jnp.sum(text, axis=-1)
            first_half = top(-state.place.astype(jnp.float32), text, jnp.maximum(1, count // 2))
            return evict(state, first_half & (count > capacity)[:, None], state.values["mass"])

        return jax.lax.while_loop(over, drop, state)

    def window(self, state: DecodeState) -> Int[Array, ""]:
        """Greatest number of text entries: T times the maximum length of text, by default that of the row."""
        assert self.text is not None
        longest = state.text + state.new_tokens if self.longest_text is None else jnp.int32(self.longest_text)
        return budgets.unbounded_share(self.text, longest)
