"""The stages of a policy: what its class may define besides the members of `Policy`, and the defaults.

Unbatched. Axes: L layers · K key heads · T tokens · H head dim.
"""

from __future__ import annotations

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.cache.pool import Storage
from vlkv.compression import budgets
from vlkv.compression.observe import Measure, Observation

Statistics = dict[str, Any]  # arrays by name
Entries = Float[Array, "K T H"]  # keys or values
Scores = Float[Array, "K T"]
Kept = Bool[Array, "K T"]
Mask = Bool[Array, " T"]
PerHead = Int[Array, " K"]
PerLayer = Int[Array, " L"]
Budgets = Int[Array, " L"] | Int[Array, "L K"]
Totals = Int[np.ndarray, " sums"]


class Stages:
    """What a policy class may define besides the members of `Policy`, and the defaults for what it does not define.

    No class derives from this one: a policy has only the stages that its class defines, and `stage_of` looks up the
    defaults here. `reductions`, `reduce`, `decode_values`, `step` and their companions are in `ReducingStages` and
    `DecodingStages`.

    An attribute that depends on options is a property: `idle = property(lambda self: ...)`. It must have no annotation,
    which would make it an option.

    Attributes:
        idle: stages that the class defines but that its options switch off, of "allocate", "rank", "merge", "step" and
            "reduce"; also "smooth", if smoothing scores cannot change the order of the tokens. In a composition another
            method may take such a stage, and the composition raises an error if it is asked to take it from this one.
        needs: conditions on the other parts of a composition. "own bits": the method also ranks, allocates and stores,
            and nothing else changes the entries. "own order": only the method's own scores choose the tokens. "whole
            prompt": the prompt is not reduced, because formulas of published code hold for whole prompts only (and may
            need their own `keep`). "same tokens": no tokens are dropped between two layers.
        own_keep: whether `keep` follows from other options, so that it cannot be given.
        needs_key: whether `generate` and `select` need a key.
        uses: what the method uses of `Observation.context`: "rotation" (`positions` and `rope`), "output_norm". "grid":
            it uses `Observation.grid`, also when the entries of a cache are selected again.
        repeats: token ids of an instruction. After the prompt the model reads it and a copy of the prompt, and the
            method observes how these attend to the prompt (`LayerContext.repeated`). None: the prompt is not repeated.
        one_scale: False if scores of text and of vision tokens are not on one scale, because text is preferred. Then
            `Smooth` smooths text and vision tokens separately.
        ranked_by: the arrays by which `rank` ranks: "scores", and names of statistics per head and token. `Smooth` is
            applied to all of them.
        softmax_n: the n of n-softmax in decode attention (CSP, Eq. 7); 0: softmax.
        storage: quantisation of the pool; None: it is not quantised.
        drops_early_layers: whether tokens that `reduce` drops are removed from earlier layers' caches too.
        class_attention_layers: indices of the tower's blocks whose attention `reduce` needs, in `Tokens.tower`.
        keeps_placeless: whether `reduce` keeps all vision tokens without a position on the grid, such as newlines.
        counts_dropped: whether `keep` is a fraction of the prompt before the method reduced it.
        every: number of new tokens after which the entries of the cache are selected again; 0: never.
        newest: of how many of the newest tokens the method observes queries when a cache is selected again; None: of
            all that have come since the last selection. A method whose `Facts.observes` is False observes none.
    """

    idle: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    own_keep: bool = False
    needs_key: bool = False
    uses: tuple[str, ...] = ()
    repeats: tuple[int, ...] | None = None
    one_scale: bool = True
    ranked_by: tuple[str, ...] = ("scores",)
    softmax_n: float = 0.0
    storage: Storage | None = None
    drops_early_layers: bool = False
    class_attention_layers: tuple[int, ...] = ()
    keeps_placeless: bool = False
    counts_dropped: bool = False
    every: int = 0
    newest: int | None = None

    def check_model(self, layers: int) -> None:
        """Raises InputError if an option does not fit a model with `layers` layers."""

    def measures(self, obs: Observation) -> dict[str, Measure]:
        """Sums of attention that the layer computes together with its output, by name, where a backend can do that.

        This saves the method a second pass over the prompt. It gets the results by `measured`, which computes them if
        the layer has not. `obs` is the observation before the attention. In a composition, two methods may use the same
        name only for equal measures.
        """
        return {}

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        """Arrays of this layer that `allocate`, `rank` or `vlkv.analysis` need, by names that the method chooses.

        `allocate` gets them of all layers, stacked along a new first axis L; `rank` gets those of one layer.
        """
        return {}

    def across(self, statistics: Statistics) -> Statistics:
        """Changes the statistics of all layers before `allocate` and `rank` get them.

        For methods in which the statistics of a layer depend on other layers. Arrays have a leading axis L.
        """
        return statistics

    def allocate(self: Any, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        """The budget of each layer: the number of tokens in scope that each of its key heads keeps.

        Budgets are whole numbers from 0 to `most`, with a sum of at most `total`; `budgets.apportion` rounds fractions
        to such numbers. With scope="vision", text is kept besides. With `Facts.budgets` "heads", budgets are per layer
        and head, and the sum over all K heads is at most K `total`. `select` raises InputError for budgets outside
        these bounds. Under jit, as in `generate`, they are clipped instead, in the upper layers if their sum is too
        large.

        Args:
            statistics: of all layers, with a leading axis L.
            total: what `keep` or `budget` allows all layers together.
            most: number of tokens in scope of each layer; with a cap, only those that the layer has stored.
            layers: L.
        """
        return budgets.uniform(total, most)

    def total(self: Any, sums: Totals, *, layers: int, text: int) -> Totals:
        """Number of entries per head that all layers together keep at most. The size of the cache follows from it.

        It runs on the host in numpy, for all numbers of tokens that a prompt may have, before the model runs.

        Args:
            sums: `sums[i]` is the number of tokens in scope of prompt i, added over all layers.
            layers: L.
            text: bound on the text tokens of a prompt.
        """
        return budgets.total(self.keep, self.budget, sums, layers=layers)

    def recent_of(self, budget: Int[Array, "*K"]) -> Int[Array, "*K"]:
        """With scope="all", the number of most recent tokens that are kept besides those of `protect`.

        For windows that are a share of the budget: `budget` has the budgets of a layer's heads, which are not known
        when `protect` is called.
        """
        return jnp.zeros_like(budget)

    def rank(self, scores: Scores, statistics: Statistics, candidates: Mask, count: PerHead) -> tuple[Scores, PerHead]:
        """Final ranking of one layer's tokens, for methods whose ranking depends on the layer's budget.

        Args:
            scores: result of `score`.
            statistics: of this layer.
            candidates: tokens in scope that are not protected.
            count: number of candidates to keep, per head.

        Returns:
            The values to rank the candidates by, and the number to keep: `count` or less.
        """
        return scores, count

    def merge(self, k: Entries, v: Entries, kept: Kept, scores: Scores) -> tuple[Entries, Entries]:
        """Merges dropped entries of one layer into kept ones.

        Args:
            k: keys of all tokens.
            v: their values.
            kept: entries that are cached.
            scores: result of `score`, but +inf for tokens out of scope, which are always kept, and -inf for padding.
                `merging.dropped(kept, scores)` is the mask of entries that may be merged.

        Returns:
            Keys and values of all tokens. Only those of kept tokens are used.
        """
        return k, v


def stage_of(policy: Any, name: str) -> Any:
    """What the class of a policy defines under this name, or else the default of `Stages`."""
    if hasattr(type(policy), name):
        return getattr(policy, name)
    default = vars(Stages)[name]
    return types.MethodType(default, policy) if callable(default) else default


def fills(policy: Any, slot: str) -> bool:
    """Whether the class of a policy defines a stage and its options do not switch it off (`Stages.idle`)."""
    return hasattr(type(policy), slot) and slot not in stage_of(policy, "idle")


def those(**conditions: bool) -> tuple[str, ...]:
    """The names whose conditions hold, for `Stages.idle`."""
    return tuple(name for name, holds in conditions.items() if holds)
