"""One layer of a prompt, what a policy observes of it, and measurements that several methods share.

Functions are unbatched: the caller applies vmap over B. Axes: T tokens · A position axes · R sets of rows · N query
heads · K key heads · G = N/K · H head dim. Attention comes from `attention_mass`, or from prefill attention, which has
measured it (`measured`), so nothing here builds a T x T matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels import Kernels
from pallas_kernels.attention_mass import Statistic
from vlkv.config import RopeConfig
from vlkv.inputs import Bounds
from vlkv.masks import ordinal, tokens_at, tokens_of
from vlkv.sharding.ops import attention_mass

Mask = Bool[Array, " T"]
Parts = Bool[Array, "R T"] | Float[Array, "R T"]  # sets of rows, or their weights
Scores = Float[Array, "K T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeated:
    """The second reading of a prompt; see `vlkv.generation.repeating`."""

    q: Float[Array, "*B N R H"]  # queries of the instruction and of the repeated prompt
    lse: Float[Array, "*B N R"] | None = None  # log-sum-exps of their logits, +inf for padding; None: not yet known
    instruction: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})  # ids of the text before it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What some methods use of the model besides queries, keys and values; `Stages.uses` names it."""

    positions: Int[Array, "*B T A"]  # queries and keys are rotated by them
    limit: Int[Array, "*B"] | None = None  # as in `rope_table`; None: no limit
    # L1 norm of each value after the output projection, mean over the query heads that share it; None: not computed.
    output_norm: Float[Array, "*B K T"] | None = None
    repeated: Repeated | None = None  # the second reading of the prompt; None: the policy has no `Stages.repeats`
    rope: RopeConfig = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measure:
    """Attention summed over rows that are known before the layer's attention, which can therefore compute the sum, too.

    `most` bounds the number of rows; None: all rows of the prompt. If it is less than half of the tokens, the rows are
    measured after the layer, which costs less.
    """

    rows: Bool[Array, "*B T"] | Float[Array, "*B T"]  # which rows, or their weights
    statistic: Statistic = dataclasses.field(default="sum", metadata={"static": True})  # as in `attention_mass`
    threshold: float = dataclasses.field(default=0.01, metadata={"static": True})
    most: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """The entries of a cache that is selected again, in which each head holds tokens of its own."""

    entries: Bool[Array, "*B K T"]  # whether a head has an entry
    number: Int[Array, "*B K T"]  # of its token among all tokens, which counts from the padded prompt
    is_vision: Bool[Array, "*B K T"]
    positions: Int[Array, "*B K T A"] | None  # None: the method does not use them
    grid: Int[Array, "*B K T 3"] | None  # the same
    rows: Bool[Array, "*B T"]  # tokens whose queries are known, the newest ones
    prompt: int = dataclasses.field(metadata={"static": True})  # the number of the first token after the prompt
    most_rows: int = dataclasses.field(metadata={"static": True})  # bound on the number of known queries
    # Whether a method scores each head by itself: needed if numbers of entries differ, or if it uses positions.
    by_head: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRun:
    """How a layer has run. The functions of this module use it; most methods need not look at it."""

    is_candidate: Bool[Array, "*B T"] | None = None  # may be cached, in scope or not; None: all valid tokens
    source: Int[Array, "*B T"] | None = None  # index of the token in the prompt; None: the prompt is not reduced
    until: Int[Array, "*B T"] | None = None  # index of the last token that each row attends to; None: its own
    lse: Float[Array, "*B N T"] | None = None  # log-sum-exp of each row's logits; None: kernels do not use it
    # What the layer's attention has measured, by the names of `Stages.measures`.
    received: dict[str, Float[Array, "*B N T"]] = dataclasses.field(default_factory=dict)
    kernels: Kernels = dataclasses.field(default=Kernels(), metadata={"static": True})  # implementations of the ops
    bounds: Bounds | None = dataclasses.field(default=None, metadata={"static": True})  # of the prompt; None: unknown
    held: Held | None = None  # None: the layer of a prompt, whose tokens all heads hold
    first: Bool[Array, "*B T"] | None = None  # tokens that a composition always keeps (`Slots.first`); None: none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Queries, keys and values of one layer for the tokens that it processed: the whole prompt unless it is reduced.

    Keys and values are what a full cache would contain; the queries are used for scores.
    """

    q: Float[Array, "*B N T H"]  # rotated
    k: Float[Array, "*B K T H"]
    v: Float[Array, "*B K T H"]
    is_vision: Bool[Array, "*B T"]
    valid: Bool[Array, "*B T"]
    grid: Int[Array, "*B T 3"] | None = None  # (image number in the prompt, line, column) of the patch; -1: none
    context: LayerContext | None = None  # what some methods use besides
    run: LayerRun = LayerRun()

    is_candidate, source = property(attrgetter("run.is_candidate")), property(attrgetter("run.source"))
    until, lse = property(attrgetter("run.until")), property(attrgetter("run.lse"))
    received, kernels = property(attrgetter("run.received")), property(attrgetter("run.kernels"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedLayers:
    """A sequence of equal `Layer`s, or of what a loop over the layers has returned for each, stacked in one record."""

    record: Any  # its arrays have a first axis L

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.record)[0])

    def __getitem__(self, i: int | Int[Array, ""]) -> Any:
        return jax.tree.map(lambda x: x[i], self.record)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBudget:
    """What `keep` or `budget` allows one layer on average."""

    asked: Float[Array, ""]  # `keep` times the tokens in scope, or `budget`
    mean: Int[Array, ""]  # the budget of all layers as a whole number, divided by L and rounded down
    # False: no prompt with these bounds has a token in scope.
    competes: bool = dataclasses.field(default=True, metadata={"static": True})
    layers: int = dataclasses.field(default=1, metadata={"static": True})  # L


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation(Layer):
    """One layer, just after it has run, as one policy sees it for one row of the batch.

    A method uses `q`, `k`, `v`, `is_vision`, `valid`, `grid`, `context` and these fields; shared functions use `run`.
    """

    in_scope: Bool[Array, " T"]  # candidates in the policy's scope
    budget: LayerBudget
    key: Key[Array, ""] | None = None  # random key of this row and layer
    # Number of the layer. Within `fill_cache` under jit it is an array, unless a stage needs an int (`Search.in_all`).
    layer: int | Int[Array, ""] = dataclasses.field(metadata={"static": True})

    asked, mean_budget = property(attrgetter("budget.asked")), property(attrgetter("budget.mean"))
    competes = property(attrgetter("budget.competes"))

    @property
    def instruction(self) -> Bool[Array, " T"]:
        """Text after the last vision token, with the template's closing text; all valid tokens if there is no image."""
        return instruction(self.is_vision, self.valid)

    @property
    def observers(self) -> Bool[Array, " T"]:
        """Tokens whose queries are known: all of a prompt, the newest ones if a cache is selected again."""
        return self.valid if self.run.held is None else self.valid & self.run.held.rows

    @property
    def first(self) -> Bool[Array, " T"]:
        """The first tokens, if a composition always keeps them."""
        return jnp.zeros_like(self.valid) if self.run.first is None else self.run.first

    @property
    def is_answer(self) -> Bool[Array, " T"]:
        """Tokens after the prompt."""
        held = self.run.held
        return jnp.zeros_like(self.valid) if held is None else self.valid & (held.number[0] >= held.prompt)

    @property
    def max_instruction(self) -> int:
        """Bound on the length of the instruction."""
        return len(self.valid) if self.run.bounds is None else self.run.bounds.instruction

    @property
    def max_vision(self) -> int | None:
        """Bound on the vision tokens; None: unknown."""
        return None if self.run.bounds is None else self.run.bounds.vision

    @property
    def max_text(self) -> int | None:
        """Bound on the other tokens; None: unknown."""
        return None if self.run.bounds is None else self.run.bounds.text


def fields_of(record: Any, *names: str) -> dict[str, Any]:
    """These fields of a record, as arguments for another record that has them too."""
    return {name: getattr(record, name) for name in names}


def instruction(is_vision: Mask, valid: Mask) -> Mask:
    """`Observation.instruction`, for stages without an observation."""
    place = jnp.arange(valid.shape[0])
    return valid & (place > jnp.max(jnp.where(is_vision, place, -1)))


def group_mean(x: Float[Array, "N T"], kv_heads: int) -> Scores:
    """Mean over the query heads that share a key head."""
    return jnp.mean(x.reshape(kv_heads, -1, x.shape[-1]), axis=1)


def head_mean(x: Float[Array, "N T"], kv_heads: int) -> Scores:
    """Mean over all query heads, repeated for every key head."""
    return jnp.broadcast_to(jnp.mean(x, axis=0), (kv_heads, x.shape[-1]))


def column_sums(obs: Observation, statistic: Statistic = "sum") -> Float[Array, "N T"]:
    """Attention that each token receives from all rows that attend to it, summed: itself and all later tokens.

    In models whose image tokens attend to each other in both directions, also the earlier tokens of its image.
    """
    return measured(obs, f"column {statistic}", Measure(obs.valid, statistic))


def prefer_text(obs: Observation, scores: Scores) -> Scores:
    """Adds the head's largest score to the scores of text, so that text is kept before vision tokens."""
    return scores + jnp.where(obs.is_vision, 0.0, jnp.max(scores, axis=-1, keepdims=True))


def columns(*statistics: Statistic) -> Callable[[Any, Observation], dict[str, Measure]]:
    """Makes the `Stages.measures` of a method that calls `column_sums` with these statistics."""
    return lambda policy, obs: {f"column {name}": Measure(obs.valid, name) for name in statistics}


def measured(obs: Observation, name: str, measure: Measure, **options: Any) -> Float[Array, "N T"]:
    """A sum that the layer's attention has computed under this name (`Stages.measures`); else it is computed here.

    `options` are those of `rows_mass`, for a measure of a limited number of rows.
    """
    if name in obs.received:
        return obs.received[name]
    if obs.run.held is not None and measure.most is None:
        measure = dataclasses.replace(measure, most=obs.run.held.most_rows)
    options |= {"statistic": measure.statistic, "threshold": measure.threshold}
    if measure.most is not None:
        return rows_mass(obs, measure.rows, measure.most, **options)
    options |= {"key_mask": obs.valid, "lse": obs.lse, "implementation": obs.kernels.attention_mass}
    weight = measure.rows[None].astype(jnp.float32)
    return attention_mass(obs.q, obs.k, row_weight=weight, row_place=obs.until, **options)[0]


def row_counts(obs: Observation) -> Int[Array, " T"]:
    """Number of rows that attend to each token; at least 1."""
    first, rows = jnp.arange(obs.valid.shape[0]), obs.observers  # the first row that attends to each token
    if obs.until is not None:
        first = jnp.searchsorted(obs.until, first)
    return jnp.maximum(jnp.sum(rows) - (jnp.cumsum(rows) - rows)[first], 1)


def rows_mass(
    obs: Observation, rows: Mask, most: int, *, keys: Mask | None = None, **options: Any
) -> Float[Array, "N T"]:
    """The model's attention summed over a few rows, with a softmax over `keys` (None: all valid tokens).

    Only the last `most` rows of the mask (or of `among`, if it is given) are used. This static bound makes it cheap:
    the rows are gathered first, instead of a second attention pass over all T rows. `options` are those of
    `split_rows_mass`.
    """
    return split_rows_mass(obs, rows[None], most, keys=keys, **options)[0]


def split_rows_mass(
    obs: Observation, parts: Parts, most: int, *, keys: Mask | None = None, among: Mask | None = None, **options: Any
) -> Float[Array, "R N T"]:
    """`rows_mass` for R sets of rows, each summed separately; numbers instead of masks are weights of the rows.

    The last `most` rows of `among` (None: of all parts together) are gathered. Give `among` if it is the same in all
    layers, so that XLA computes its indices only once. Other options go to `attention_mass`.
    """
    rows = jnp.any(parts != 0, axis=0) if among is None else among
    if obs.run.held is not None:
        rows, most = rows & obs.observers, min(most, obs.run.held.most_rows)
    most = min(most, rows.shape[0])
    from_last = jnp.sum(rows) - 1 - ordinal(rows)  # 0 for the last row of the mask
    picked = tokens_at(jnp.where(rows, from_last, most), most)
    present = picked >= 0
    picked = jnp.maximum(picked, 0)
    q, of_part = (x.at[:, picked].get(mode="promise_in_bounds", wrap_negative_indices=False) for x in (obs.q, parts))
    options |= {"key_mask": obs.valid if keys is None else keys, "implementation": obs.kernels.attention_mass}
    weight = jnp.where(present, of_part, 0).astype(jnp.float32)
    place = picked if obs.until is None else obs.until[picked]
    return attention_mass(q, obs.k, row_weight=weight, row_place=place, **options)


def each_row(obs: Observation, rows: Mask, most: int, **options: Any) -> Float[Array, "R N T"]:
    """Causal attention of each of the last `most` rows of a mask; rows that do not exist have 0. For tens of rows.

    `options` are those of `split_rows_mass`.
    """
    most, rows = min(most, rows.shape[0]), rows & obs.observers
    from_last = jnp.where(rows, jnp.sum(rows) - 1 - ordinal(rows), most)
    parts = jnp.arange(most)[:, None] == from_last
    return split_rows_mass(obs, parts, most, among=rows, **options)


def not_negative(scores: Scores, candidates: Mask) -> Scores:
    """Shifts the scores of each head so that no candidate is negative: the lowest one, if it is negative, gets 0."""
    lowest = jnp.min(scores, axis=1, keepdims=True, where=candidates, initial=0.0)
    return jnp.where(candidates, scores - lowest, 0.0)


def pool(x: Scores, kernel: int, kind: Literal["avg", "max"]) -> Scores:
    """Smooths scores along the tokens with an odd kernel; outside values count as 0 (SnapKV, Sec. 4)."""
    reduce, start = (jax.lax.add, 0.0) if kind == "avg" else (jax.lax.max, -jnp.inf)
    half = kernel // 2
    padded = jnp.pad(x, [(0, 0), (half, half)])
    y = jax.lax.reduce_window(padded, start, reduce, (1, kernel), (1, 1), "VALID")
    return y / kernel if kind == "avg" else y


def reflected_mean(x: Scores, among: Mask, kernel: int) -> Scores:
    """The mean over `kernel` neighbouring tokens of the mask, an odd number; at both ends the tokens are reflected.

    The end itself is not repeated; with fewer tokens the kernel is narrower. Other tokens do not count, wherever they
    are, and their results are not defined.
    """
    count, place, token = jnp.sum(among), ordinal(among), jnp.maximum(tokens_of(among), 0)
    half = jnp.minimum(kernel // 2, count - 1)
    total = jnp.zeros_like(x)
    for offset in range(-(kernel // 2), kernel // 2 + 1):
        neighbour = jnp.abs(place + offset)
        neighbour = jnp.clip(jnp.where(neighbour < count, neighbour, 2 * (count - 1) - neighbour), 0, x.shape[1] - 1)
        total += jnp.where(abs(offset) <= half, x[:, token[neighbour]], 0.0)
    return total / (2 * jnp.maximum(half, 0) + 1)
