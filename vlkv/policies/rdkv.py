from __future__ import annotations

import functools
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.cache.pool import Digits, Storage
from vlkv.compression import budgets
from vlkv.compression.observe import Observation, group_mean, not_negative, reflected_mean, row_counts, rows_mass
from vlkv.compression.option_types import Odd, Positive, Range
from vlkv.compression.policy import Budgets, Facts, Mask, PerHead, PerLayer, Policy, Scores, Statistics, Totals
from vlkv.masks import binary_search, last

_INFINITY = 0x7F800000  # bits of a float32
_WHOLE = 8  # digits of 2 bits in full precision

Steps = tuple[tuple[int, float], ...]  # of each step: how many digits it adds, and the error that each of them saves


class RDKV(Policy):
    """Divides the bits of `keep` among values and key channels so that the expected distortion is least.

    A value with score s in b bits costs s e(b) + lambda b, where e is the error of b bits, and gets the bits for which
    this is least; 0 bits evict key and value. Lambda is the smallest for which a head's bits suffice. `keep` and
    `budget` mean the tokens that would fill the same bytes in 16 bits, so several times as many are stored. The bits
    of key channels are chosen in the same way, and hold for all entries of a layer and head. A value's score is the
    attention of the last `window` queries; a channel's is that of ThinK (Zhang et al. 2026).

    Attributes:
        window: number of observing rows at the end of the prompt.
        kernel: width of the mean over neighbouring tokens, odd.
        key_bits: how many of the 32 bits of a key number and a value number are for keys, an even number.
        key_errors: mean squared error of keys in 2, 4 and 8 bits, relative to the variance of their channel.
        value_errors: mean squared error of values in 2, 4 and 8 bits, relative to their mean square.
    """

    window: Positive = 32
    kernel: Odd = 5
    key_bits: Annotated[int, Range(8, 24)] = 16
    key_errors: tuple[float, float, float] = (0.277, 0.011, 0.000061)
    value_errors: tuple[float, float, float] = (0.312, 0.0138, 0.000048)
    facts = Facts(stages="score, store", budgets="bits")
    needs = ("own bits",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("key_bits", self.key_bits % 2 == 0, "must be even, because digits have 2 bits")
        for name in ("key_errors", "value_errors"):
            two, four, eight = getattr(self, name)
            self.check(name, 1 > two > four > eight > 0 and eight < 0.5, "must fall from below 1, to below 0.5")

    @property
    def storage(self) -> Storage:
        return Storage(2, None, budget_digits=self._budget_digits)

    @property
    def _budget_digits(self) -> tuple[int, int]:
        # For each token of the budget, the digits for a key number and for a value number.
        return self.key_bits // 2, 2 * _WHOLE - self.key_bits // 2

    def total(self, sums: Totals, *, layers: int, text: int) -> Totals:
        """The most entries that can be kept: each has at least one of the digits for values."""
        tokens = budgets.total(self.keep, self.budget, sums, layers=layers) // max(layers, 1)
        return layers * self._budget_digits[1] * tokens

    def score(self, obs: Observation) -> Scores:
        """Mean attention of the window's rows that attend to a token, smoothed with reflection at both ends."""
        mass = group_mean(rows_mass(obs, last(obs.valid, self.window), self.window), obs.k.shape[0])
        return reflected_mean(mass / jnp.minimum(row_counts(obs), self.window), obs.in_scope, self.kernel)

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        key_digits, value_digits = self._budget_digits
        candidates = obs.valid if obs.is_candidate is None else obs.is_candidate
        text, head_dim = candidates & ~obs.in_scope, obs.k.shape[2]  # text is kept in full precision
        most_digits = jnp.broadcast_to(value_digits * obs.mean_budget, obs.k.shape[:1])
        positive = jnp.where(obs.in_scope, not_negative(scores, obs.in_scope), -1.0)
        values = divide(positive, most_digits, steps_of(self.value_errors))
        kept = jnp.sum(values > 0, axis=1)
        # One digit of a channel is stored for all entries, and a byte holds the digits of four of them.
        channel_bytes = -(-(kept + jnp.sum(text)) // 4)
        most_key_digits = (key_digits * obs.mean_budget + _WHOLE * jnp.sum(text)) * head_dim
        window = last(obs.valid, self.window)[:, None]
        queries = jnp.mean(jnp.where(window, obs.q.astype(jnp.float32) ** 2, 0.0), axis=1)
        queries = jnp.mean(queries.reshape(len(kept), -1, head_dim), axis=1)
        keys = jnp.mean(jnp.where(obs.valid[:, None], obs.k.astype(jnp.float32) ** 2, 0.0), axis=1)
        most_per_entry = most_key_digits // jnp.maximum(4 * channel_bytes, 1)
        channels = divide(queries * keys, most_per_entry, steps_of(self.key_errors))
        digits = Digits(jnp.where(text, _WHOLE, values).astype(jnp.uint8), channels.astype(jnp.uint8))
        return {"digits": digits, "kept": kept}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        del total, most, layers
        return statistics["kept"]

    def rank(self, scores: Scores, statistics: Statistics, candidates: Mask, count: PerHead) -> tuple[Scores, PerHead]:
        del scores, candidates
        return (statistics["digits"].values > 0).astype(jnp.float32), count


def steps_of(errors: tuple[float, float, float]) -> Steps:
    """The steps from 0 digits to full precision along the lower convex hull of the errors.

    Numbers of bits above the hull are never the best ones, whatever lambda is, so no step ends there.
    """
    points = list(zip((0, 1, 2, 4, _WHOLE), (1.0, *errors, 0.0), strict=True))
    steps: list[tuple[int, float]] = []
    while points[1:]:
        (digits, error), *others = points
        gains = [(error - e) / (d - digits) for d, e in others]
        best = gains.index(max(gains))
        steps.append((others[best][0] - digits, gains[best]))
        points = others[best:]
    return tuple(steps)


@functools.partial(jax.jit, static_argnames="steps")  # outside of a program it would compile each operation
def divide(scores: Float[Array, "K n"], most: Int[Array, " K"], steps: Steps) -> Int[Array, "K n"]:
    """The digits of each number, at most `most` in all, so that the sum of score x e(digits) is least.

    A step of a number is taken if the number's score times the error that a digit saves exceeds lambda, the smallest
    one for which `most` suffices. Steps for which it equals lambda are taken while they fit, first those that add fewer
    digits, then those of earlier numbers. Numbers with a negative score get no digits.
    """
    cost = jnp.array([digits for digits, _ in steps])
    value, most = jnp.stack([scores * gain for _, gain in steps]), most[:, None]  # [steps, K, n], [K, 1]

    def price(number: Array) -> Float[Array, "K 1"]:  # falls as the number grows
        falling = _INFINITY - jnp.minimum(number, _INFINITY).astype(jnp.int32)
        return jax.lax.bitcast_convert_type(falling, jnp.float32)

    def spent(value: Array, number: Array) -> Int[Array, "K 1"]:
        return jnp.sum(cost[:, None, None] * (value > price(number)), axis=(0, 2))[:, None]

    number, value = binary_search(value, 31, lambda value, number: spent(value, number) <= most, most.shape)
    remaining, digits = most - spent(value, number), jnp.zeros(scores.shape, jnp.int32)
    for c, v in zip(cost, value, strict=True):
        equal = v == price(number)
        equal = equal & (c * jnp.cumsum(equal, axis=1) <= remaining)
        remaining = remaining - c * jnp.sum(equal, axis=1, keepdims=True)
        digits = digits + c * ((v > price(number)) | equal)
    return digits
