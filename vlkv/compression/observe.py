"""The observation of one layer that policies score, and measurements that several methods share.

Unbatched: the caller applies vmap over B. Axes: T tokens · A position axes · R sets of rows · N query heads · K key
heads · G = N/K · H head dim. Attention comes from `attention_mass`, or from prefill attention, which has measured it
(`measured`), so nothing here builds a T x T matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels import Kernels
from pallas_kernels.attention_mass import Statistic
from vlkv.config import RopeConfig
from vlkv.masks import ordinal, tokens_at, tokens_of
from vlkv.sharding.ops import attention_mass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeated:
    """The second reading of a prompt; see `vlkv.generation.repeating`."""

    q: Float[Array, "*B N R H"]  # queries of the instruction and of the repeated prompt
    lse: Float[Array, "*B N R"] | None = None  # log-sum-exps of their logits, +inf for padding; None: not yet known
    instruction: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})  # ids before it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What some methods use of the model besides queries, keys and values; `Stages.uses` names it.

    Attributes:
        positions: of the tokens; queries and keys are rotated by them.
        limit: as in `rope_table`; None: no limit.
        output_norm: L1 norm of each value after the output projection of a query head, mean over the query heads that
            share the value's head; None: not computed.
        repeated: the second reading of the prompt; None: the policy has no `Stages.repeats`.
        rope: settings of the rotation.
    """

    positions: Int[Array, "*B T A"]
    limit: Int[Array, "*B"] | None = None
    output_norm: Float[Array, "*B K T"] | None = None
    repeated: Repeated | None = None
    rope: RopeConfig = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measure:
    """Attention summed over rows that a method knows before the layer's attention, which then computes it in passing.

    Attributes:
        rows: which rows, or their weights.
        statistic: as in `attention_mass`.
        threshold: likewise.
        most: bound on the number of rows; None: all rows of the prompt. If it is less than half of the tokens, the rows
            are measured after the layer, which costs less.
    """

    rows: Bool[Array, "*B T"] | Float[Array, "*B T"]
    statistic: Statistic = dataclasses.field(default="sum", metadata={"static": True})
    threshold: float = dataclasses.field(default=0.01, metadata={"static": True})
    most: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """Queries, keys and values of one layer, just after it has run, for one row of the batch."""

    q: Float[Array, "N T H"]
    k: Float[Array, "K T H"]
    v: Float[Array, "K T H"]
    is_vision: Bool[Array, " T"]
    valid: Bool[Array, " T"]
    in_scope: Bool[Array, " T"]  # candidates in the policy's scope
    is_candidate: Bool[Array, " T"] | None = None  # may be cached, in scope or not; None: all valid tokens
    asked: Float[Array, ""]  # `keep` times the tokens in scope, or `budget`: what a layer keeps on average
    mean_budget: Int[Array, ""]  # the same, rounded over all layers and then down
    key: Key[Array, ""] | None  # random key of this row and layer
    # Its number; within `fill_cache` under jit an array, unless a stage needs an int, for example for an `if`.
    layer: int | Int[Array, ""] = dataclasses.field(metadata={"static": True})
    max_instruction: int = dataclasses.field(metadata={"static": True})  # bound on the instruction's length
    max_vision: int | None = dataclasses.field(default=None, metadata={"static": True})  # bound on the vision tokens
    max_text: int | None = dataclasses.field(default=None, metadata={"static": True})  # bound on the others
    grid: Int[Array, "T 3"] | None = None  # (image number in the prompt, line, column) of the patch; -1: none
    until: Int[Array, " T"] | None = None  # last token that each row attends to; None: its own
    lse: Float[Array, "N T"] | None = None  # log-sum-exp of each row's logits; None: not computed
    competes: bool = dataclasses.field(default=True, metadata={"static": True})  # False: no token is in scope
    context: LayerContext | None = None  # given to methods that use it
    received: dict[str, Float[Array, "N T"]] = dataclasses.field(default_factory=dict)  # of `Stages.measures`, if known
    kernels: Kernels = dataclasses.field(default=Kernels(), metadata={"static": True})  # implementations of the ops

    @property
    def instruction(self) -> Bool[Array, " T"]:
        """Text after the last vision token, with the template's closing text; all valid tokens if there is no image."""
        return instruction(self.is_vision, self.valid)


def instruction(is_vision: Bool[Array, " T"], valid: Bool[Array, " T"]) -> Bool[Array, " T"]:
    """`Observation.instruction`, for stages without an observation."""
    place = jnp.arange(valid.shape[0])
    return valid & (place > jnp.max(jnp.where(is_vision, place, -1)))


def group_mean(x: Float[Array, "N T"], kv_heads: int) -> Float[Array, "K T"]:
    """Mean over the query heads that share a key head."""
    return jnp.mean(x.reshape(kv_heads, -1, x.shape[-1]), axis=1)


def head_mean(x: Float[Array, "N T"], kv_heads: int) -> Float[Array, "K T"]:
    """Mean over all query heads, repeated for every key head."""
    return jnp.broadcast_to(jnp.mean(x, axis=0), (kv_heads, x.shape[-1]))


def column_sums(obs: Observation, statistic: Statistic = "sum") -> Float[Array, "N T"]:
    """Attention that each token receives from all rows that attend to it, summed: itself and all later tokens.

    In models whose image tokens attend to each other in both directions, also the earlier tokens of its image.
    """
    return measured(obs, f"column {statistic}", Measure(obs.valid, statistic))


def prefer_text(obs: Observation, scores: Float[Array, "K T"]) -> Float[Array, "K T"]:
    """The scores, for text tokens plus the head's largest one, so that text is kept before vision tokens."""
    return scores + jnp.where(obs.is_vision, 0.0, jnp.max(scores, axis=-1, keepdims=True))


def columns(*statistics: Statistic) -> Callable[[Any, Observation], dict[str, Measure]]:
    """For `Stages.measures` of methods that use `column_sums` with these statistics."""
    return lambda policy, obs: {f"column {name}": Measure(obs.valid, name) for name in statistics}


def measured(obs: Observation, name: str, measure: Measure, **options: Any) -> Float[Array, "N T"]:
    """What the layer's attention has measured under this name (`Stages.measures`), or else the same, measured now.

    `options` are those of `rows_mass`, for a measure of a limited number of rows.
    """
    if name in obs.received:
        return obs.received[name]
    options |= {"statistic": measure.statistic, "threshold": measure.threshold}
    if measure.most is not None:
        return rows_mass(obs, measure.rows, measure.most, **options)
    return attention_mass(
        obs.q, obs.k, row_weight=measure.rows[None].astype(jnp.float32), key_mask=obs.valid, row_place=obs.until,
        lse=obs.lse, implementation=obs.kernels.attention_mass, **options,
    )[0]  # fmt: skip


def row_counts(obs: Observation) -> Int[Array, " T"]:
    """Number of rows that attend to each token; at least 1."""
    first = jnp.arange(obs.valid.shape[0])  # the first row that attends to each token
    if obs.until is not None:
        first = jnp.searchsorted(obs.until, first)
    return jnp.maximum(jnp.sum(obs.valid) - ordinal(obs.valid)[first], 1)


def rows_mass(
    obs: Observation, rows: Bool[Array, " T"], most: int, *, keys: Bool[Array, " T"] | None = None, **options: Any
) -> Float[Array, "N T"]:
    """The model's attention summed over a few rows, with a softmax over `keys` (None: all valid tokens).

    Only the last `most` rows of the mask (or of `among`, if it is given) are used. This static bound makes it cheap:
    the rows are gathered first, instead of a second attention pass over all T rows. `options` are those of
    `split_rows_mass`.
    """
    return split_rows_mass(obs, rows[None], most, keys=keys, **options)[0]


def split_rows_mass(
    obs: Observation,
    parts: Bool[Array, "R T"] | Float[Array, "R T"],
    most: int,
    *,
    keys: Bool[Array, " T"] | None = None,
    among: Bool[Array, " T"] | None = None,
    **options: Any,
) -> Float[Array, "R N T"]:
    """`rows_mass` for R sets of rows, each summed separately; numbers instead of masks are weights of the rows.

    The last `most` rows of `among` (None: of all parts together) are gathered. Give `among` if it is the same in all
    layers, so that XLA computes its indices only once. Other options go to `attention_mass`.
    """
    rows = jnp.any(parts != 0, axis=0) if among is None else among
    most = min(most, rows.shape[0])
    from_last = jnp.sum(rows) - 1 - ordinal(rows)
    picked = tokens_at(jnp.where(rows, from_last, most), most)
    present = picked >= 0
    picked = jnp.maximum(picked, 0)
    q, of_part = (x.at[:, picked].get(mode="promise_in_bounds", wrap_negative_indices=False) for x in (obs.q, parts))
    return attention_mass(
        q,
        obs.k,
        row_weight=jnp.where(present, of_part, 0).astype(jnp.float32),
        key_mask=obs.valid if keys is None else keys,
        row_place=picked if obs.until is None else obs.until[picked],
        implementation=obs.kernels.attention_mass,
        **options,
    )


def each_row(obs: Observation, rows: Bool[Array, " T"], most: int, **options: Any) -> Float[Array, "R N T"]:
    """Causal attention of each of the last `most` rows of a mask; 0 if there are fewer. For tens of rows.

    `options` are those of `split_rows_mass`.
    """
    most = min(most, rows.shape[0])
    from_last = jnp.where(rows, jnp.sum(rows) - 1 - ordinal(rows), most)
    parts = jnp.arange(most)[:, None] == from_last
    return split_rows_mass(obs, parts, most, among=rows, **options)


def not_negative(scores: Float[Array, "K T"], candidates: Bool[Array, " T"]) -> Float[Array, "K T"]:
    """The scores of each head, shifted so that its lowest candidate has 0 if that is negative."""
    lowest = jnp.min(scores, axis=1, keepdims=True, where=candidates, initial=0.0)
    return jnp.where(candidates, scores - lowest, 0.0)


def pool(x: Float[Array, "K T"], kernel: int, kind: Literal["avg", "max"]) -> Float[Array, "K T"]:
    """Smooths scores along the tokens with an odd kernel; outside values count as 0 (SnapKV, Sec. 4)."""
    reduce, start = (jax.lax.add, 0.0) if kind == "avg" else (jax.lax.max, -jnp.inf)
    half = kernel // 2
    padded = jnp.pad(x, [(0, 0), (half, half)])
    y = jax.lax.reduce_window(padded, start, reduce, (1, kernel), (1, 1), "VALID")
    return y / kernel if kind == "avg" else y


def reflected_mean(x: Float[Array, "K T"], among: Bool[Array, " T"], kernel: int) -> Float[Array, "K T"]:
    """The mean over `kernel` neighbouring tokens of the mask, an odd number; at both ends the tokens are reflected.

    The end itself is not repeated; with fewer tokens the kernel is narrower. Other tokens do not count, wherever they
    are, and their results are not defined.
    """
    count, place, token = jnp.sum(among), ordinal(among), jnp.maximum(tokens_of(among), 0)
    half = jnp.minimum(kernel // 2, count - 1)
    total = jnp.zeros_like(x)
    for offset in range(-(kernel // 2), kernel // 2 + 1):
        other = jnp.abs(place + offset)
        other = jnp.clip(jnp.where(other < count, other, 2 * (count - 1) - other), 0, x.shape[1] - 1)
        total += jnp.where(abs(offset) <= half, x[:, token[other]], 0.0)
    return total / (2 * jnp.maximum(half, 0) + 1)
