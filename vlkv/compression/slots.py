"""Which method fills each slot of a policy: the policy itself, or several methods in a composition.

A slot is a place for a stage, such as "score" or "merge". It is unrelated to the slots of the cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Int

from vlkv.cache.pool import Storage
from vlkv.compression.observe import Measure, Observation
from vlkv.compression.option_types import use_python_numbers
from vlkv.compression.policy import DecodingStages, Facts, Policy, ReducingStages
from vlkv.compression.smooth import Smooth
from vlkv.compression.stages import Mask, Scores, Statistics, fills, stage_of
from vlkv.masks import first, last

_COMMON = ("keep", "budget", "scope")  # options of a composition
# Slots whose owners have these options of the composition. A method that reduces or stores has its own.
_SHARED = ("score", "rank", "allocate", "merge", "step")
NUMBERS = ("answer", "every", "first")  # numbers of tokens
STAGES = ("rank", "allocate", "merge", "step", "reduce", "store")  # slots that hold a method, besides `score`


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """The owner of each slot: the method whose stage is used. No owner is itself a composition.

    `slots_of` makes the record of a single method, which owns all of its slots.

    Attributes:
        score: scores and protects tokens.
        rank: ranks the tokens of a layer.
        allocate: divides the budget among layers and heads.
        merge: merges dropped entries into kept ones; None: they are not merged.
        step: updates the cache while decoding; None: nothing does.
        reduce: reduces the prompt during prefill; None: it is not reduced.
        store: quantises the pool; None: it is not quantised.
        smooth: smooths scores for ranking.
        answer: number of tokens of the answer before the cache is compressed; 0: after prefill.
        every: number of new tokens after which the entries of the cache are selected again; 0: never.
        first: number of the first tokens of a conversation that are always kept.
    """

    score: Policy
    rank: Policy
    allocate: Policy
    merge: Policy | None = None
    step: DecodingStages | None = None
    reduce: ReducingStages | None = None
    store: Policy | None = None
    smooth: Smooth | None = None
    answer: int = 0
    every: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        use_python_numbers(self)

    @property
    def owners(self) -> tuple[Policy, ...]:
        """The owners of all slots, each once."""
        return _distinct(self.score, *(getattr(self, name) for name in STAGES))

    @property
    def deciding(self) -> tuple[Policy, ...]:
        """The methods whose `statistics` are computed, each once. Tuples of statistics have this order."""
        return _distinct(self.score, self.rank, self.allocate)

    def named(self, policy: Policy) -> str:
        """The first slot that a method owns."""
        return next(name for name in ("score", *STAGES) if getattr(self, name) == policy)

    def with_options(self, **options: Any) -> Slots:
        """The same methods, with the composition's `keep`, `budget`, `scope` and `cap`.

        `cap` is given to the method that allocates. A method that reduces or stores keeps its own options, unless it
        also scores or allocates.
        """

        def changed(name: str) -> Any:
            owner = getattr(self, name)
            shares = name in _SHARED or owner == self.score or (name == "store" and owner == self.allocate)
            if owner is None or not shares:
                return owner
            wanted = {k: v for k, v in options.items() if k in _COMMON or owner == self.allocate}
            differs = any(getattr(owner, option) != value for option, value in wanted.items())
            return dataclasses.replace(owner, **wanted) if differs else owner

        return dataclasses.replace(self, **{name: changed(name) for name in ("score", *STAGES)})

    def first_of(self, valid: Mask) -> Mask | None:
        """The first tokens, which are always kept; None: there are none."""
        return first(valid, self.first) if self.first else None

    def protect(self, obs: Observation) -> Mask:
        """Tokens that are kept whatever their score, within the budget."""
        return self.score.protect(obs) | obs.first

    # --- what follows from all of them ------------------------------------------------------------------------------

    @property
    def storage(self) -> Storage | None:
        """Quantisation of the pool."""
        return None if self.store is None else stage_of(self.store, "storage")

    @property
    def evicts(self) -> bool:
        """Whether entries are evicted after prefill. A method that reduces the prompt may evict entries instead."""
        return self.score.facts.selects or "reduce" in stage_of(self.score, "idle")

    @property
    def softmax_n(self) -> float:
        """The n of n-softmax in decode attention."""
        return stage_of(self.score, "softmax_n")

    @property
    def counts_dropped(self) -> bool:
        """Whether `keep` is a fraction of the prompt before it is reduced."""
        return stage_of(self.score, "counts_dropped") and self.score == self.reduce

    @property
    def follows_paper(self) -> bool:
        """False for formulas of published code, which hold for whole prompts only and may need their own `keep`."""
        return not any("whole prompt" in stage_of(owner, "needs") for owner in self.owners)

    @property
    def uses(self) -> tuple[str, ...]:
        """What the methods use of `Observation.context`."""
        return tuple(sorted({name for owner in self.owners for name in stage_of(owner, "uses")}))

    @property
    def newest(self) -> int:
        """Of how many of the newest tokens the methods observe queries when a cache is selected again."""
        observing = (owner for owner in self.deciding if owner.facts.observes)
        counts = (stage_of(owner, "newest") for owner in observing)
        return max((self.every if count is None else count for count in counts), default=0)

    @property
    def repeats(self) -> tuple[int, ...] | None:
        """The instruction after which the prompt is repeated; None: it is not. `compose` allows only one."""
        return next((ids for owner in self.owners if (ids := stage_of(owner, "repeats")) is not None), None)

    @property
    def needs_key(self) -> bool:
        """Whether one of the methods draws at random."""
        return any(stage_of(owner, "needs_key") for owner in self.owners)

    @property
    def measuring(self) -> tuple[Policy, ...]:
        """The methods that observe and want sums of attention to be measured, each once."""
        return tuple(owner for owner in _distinct(*self.deciding, self.step, self.reduce) if fills(owner, "measures"))

    def measures(self, obs: Observation) -> dict[str, Measure]:
        """What these methods want to have measured."""
        return {name: x for owner in self.measuring for name, x in stage_of(owner, "measures")(obs).items()}

    @property
    def divides_bits(self) -> bool:
        """Whether a token is kept if it gets bits, so that protected tokens have high scores instead."""
        return self.allocate.facts.budgets == "bits"

    def recent_of(self, budget: Int[Array, "*K"]) -> Int[Array, "*K"]:
        """`Stages.recent_of` of the method that scores."""
        return stage_of(self.score, "recent_of")(budget)

    def across(self, statistics: tuple[Statistics, ...]) -> tuple[Statistics, ...]:
        """`Stages.across` of each method, applied to its own statistics."""
        return tuple(stage_of(owner, "across")(x) for owner, x in zip(self.deciding, statistics, strict=True))

    def of(self, owner: Policy, statistics: tuple[Statistics, ...]) -> Statistics:
        """The statistics of one of the methods."""
        return statistics[self.deciding.index(owner)]

    def smoothed(self, x: Scores, obs: Observation) -> Scores:
        """Scores, or statistics, after smoothing among the tokens that compete with each other.

        Scores of tokens that are kept in any case say nothing about their neighbours: some methods give them none.
        """
        if self.smooth is None:
            return x
        among = obs.in_scope
        if self.score.scope == "all":
            among &= ~self.protect(obs)
            among &= ~last(obs.in_scope, self.recent_of(obs.mean_budget))
        # The window of `Smooth` contains only tokens in scope, so each kind is made the scope in turn.
        kinds = (among,) if stage_of(self.score, "one_scale") else (among & obs.is_vision, among & ~obs.is_vision)
        for kind in kinds:
            x = self.smooth(x, dataclasses.replace(obs, in_scope=kind))
        return x


def _distinct(*policies: Policy | None) -> tuple[Policy, ...]:
    return tuple(dict.fromkeys(policy for policy in policies if policy is not None))


class Composed(Policy):
    """The result of `compose`: a policy whose slots are filled by several methods, with the options that they share."""

    slots: Slots

    def __post_init__(self) -> None:
        slots = self.slots.with_options(keep=self.keep, budget=self.budget, scope=self.scope, cap=self.cap)
        object.__setattr__(self, "slots", slots)  # `dataclasses.replace` may have changed the options
        allocator, ranker = slots.allocate.facts, slots.rank
        facts = Facts(
            stages="composed",
            budgets=allocator.budgets,
            capped=allocator.capped and (ranker.facts.capped or not hasattr(type(ranker), "rank")),
            selects=slots.score.facts.selects,
            observes=slots.score.facts.observes,
        )
        object.__setattr__(self, "facts", facts)
        super().__post_init__()
        self.check("cap", self.cap is None or slots.merge is None, "cannot be combined with merging")


def slots_of(policy: Policy) -> Slots:
    """The owner of each slot of a policy. For a single method, this is the method itself or None."""
    if isinstance(policy, Composed):
        return policy.slots
    method: Any = policy  # the owners of some slots have narrower types, which a class has by defining a stage
    return Slots(
        score=policy,
        rank=policy,
        allocate=policy,
        merge=method if fills(policy, "merge") else None,
        step=method if fills(policy, "step") else None,
        reduce=method if fills(policy, "reduce") else None,
        store=method if hasattr(type(policy), "storage") else None,
        every=stage_of(policy, "every"),
    )
