"""What is known of a method before it runs, so that shared code asks for facts and not for methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Int

from vlkv.compression.observe import Measure, Observation

Statistics = dict[str, Any]  # arrays by name; a composition has a dictionary of them for each method


class Facts(NamedTuple):
    """What is known of a method before it runs. A field with its default value is that of the base class.

    Attributes:
        paper: first author, year and title, or "baseline".
        equations: where the paper defines the method.
        source: where the paper and the published code are.
        stages: the stages that the method changes, separated by commas. Overrides of `allocate`, `rank` and `merge` are
            added automatically.
        budgets: which budgets may differ: "equal": none; "layers": those of the layers; "heads": those of the layers
            and heads; "bits": `keep` is a share of the bits, from which the numbers of entries follow. A class that
            overrides `allocate` has "layers" unless it says otherwise.
        capped: whether `cap` is supported: `allocate` needs no more than its arguments, `rank` no more than scores.
        selects: whether entries are evicted after prefill.
        observes: whether `score` depends on queries, so that further queries may change it.
        own_keep: whether `keep` follows from other options, so that it cannot be given.
        needs_key: whether `generate` and `select` need a key.
        ranked_by: what `rank` ranks by: "scores", and names of statistics per head and token. Smoothing changes them
            all.
        keeps_placeless: whether all vision tokens without a place on the grid are kept while the prompt is reduced.
        counts_dropped: whether `keep` is a fraction of the prompt before the method reduced it.
        uses: what the method uses of `Observation.context`: "rotation" (`positions` and `rope`), "output_norm".
        measures: a function of the policy and of the observation before the layer's attention, which returns by name
            what this attention measures while it computes its output, where a backend can do that. The method gets the
            results by `measured`. In a composition names must differ unless the measures are equal.
        repeats: a function of the policy, which returns the ids of an instruction. After it the model reads the prompt
            again, for a method that observes the second reading (`LayerContext.repeated`).
        across: a function of the policy and of the statistics of all layers, stacked along a new first axis L, which
            returns them as `allocate` and `rank` get them, for methods in which a layer depends on other layers.
        recent: with scope="all", the number of most recent tokens that are kept besides `protect`: a function of the
            policy and of the budgets of a layer's heads, which are not known when `protect` is called.
        idle: a function of the policy, which returns those of the stages "allocate", "rank" and "smooth" that would
            change nothing with its options, so that a composition can refuse them.
        one_scale: False if scores of text and of vision tokens are not on one scale, because text is preferred. Then
            smoothing does not mix them.
        follows_kept: False if `merge` merges in an order of the method's own, so that only its own scores may choose
            the tokens that are kept. Budgets may be those of another method.
        answer: number of tokens of the answer before the cache is compressed; a composition sets it (`compose`).
    """

    paper: str = ""
    equations: str = ""
    source: str = ""
    stages: str = "score"
    budgets: Literal["equal", "layers", "heads", "bits"] = "equal"
    capped: bool = False
    selects: bool = True
    observes: bool = True
    own_keep: bool = False
    needs_key: bool = False
    ranked_by: tuple[str, ...] = ("scores",)
    keeps_placeless: bool = False
    counts_dropped: bool = False
    uses: tuple[str, ...] = ()
    measures: Callable[[Any, Observation], dict[str, Measure]] | None = None
    repeats: Callable[[Any], tuple[int, ...]] | None = None
    across: Callable[[Any, Statistics], Statistics] | None = None
    recent: Callable[[Any, Int[Array, "*K"]], Int[Array, "*K"]] | None = None
    idle: Callable[[Any], tuple[str, ...]] | None = None
    one_scale: bool = True
    follows_kept: bool = True
    answer: int = 0
