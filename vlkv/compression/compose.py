"""Combines the scores of one method with the budgets, merging, decode steps, reduction or storage of others."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from vlkv.compression.checking import checked_scores, require_policy
from vlkv.compression.composable import STAGES, check_answer, check_bits, check_parts
from vlkv.compression.observe import Measure, Observation
from vlkv.compression.option_types import Count
from vlkv.compression.policy import Facts, Policy, ReducingStages, Statistics
from vlkv.compression.smooth import Smooth
from vlkv.errors import InputError
from vlkv.masks import last

Part = Policy | type[Policy]
_BUDGETED = ("scored", "ranked", "allocated", "merged", "stepped")  # parts of a composition that have its budget
_COMMON = ("keep", "budget", "scope")  # options that these parts have in common


def compose(
    scores: Policy,
    *,
    rank: Part | None = None,
    allocate: Part | None = None,
    merge: Part | None = None,
    step: Part | None = None,
    reduce: Part | None = None,
    store: Part | None = None,
    smooth: Smooth | None = None,
    answer: int | None = None,
) -> Composed:
    """A policy with stages of several methods, or one that compresses later.

        compose(SnapKV(keep=0.2), allocate=PrefixKV)                      SnapKV's scores, PrefixKV's budgets
        compose(AirCache(keep=0.1), reduce=LightKV(), store=KIVI(bits=4)) LightKV, then AirCache, stored in 4 bits
        compose(SnapKV(keep=0.1, kernel=1), smooth=Smooth(9))             SnapKV with the mean over nine tokens
        compose(H2O(keep=0.2), rank=CriticalKV)                           CriticalKV's second stage, with H2O's scores
        compose(SnapKV(keep=0.1), answer=8)                               SnapKV, which observes eight more tokens

    Args:
        scores: scores and protects tokens. Its `keep` or `budget` and its `scope` are those of the composition. If the
            prompt is reduced, they refer to the tokens that are left.
        rank: ranks the tokens of a layer by the scores of `scores` and statistics of its own.
        allocate: divides the budget among layers, by its own scores.
        merge: merges dropped entries into kept ones.
        step: updates the cache while decoding.
        reduce: reduces the prompt during prefill, with its own `keep`.
        store: quantises the pool.
        smooth: smooths the scores of `scores` for ranking, and statistics by which `rank` ranks. Budgets and decode
            steps use the scores without smoothing. Tokens that are kept in any case are not averaged.
        answer: number of tokens of the answer that are decoded with the full cache. The method observes them too, and
            then the entries of the prompt are compressed. 0: after prefill; None: as `scores`.

    A part is a policy, or a class, which is used with its defaults. Parts for rank, allocate, merge and step must have
    the same budget and scope as `scores`.

    Compositions can be composed again. As `scores`, a composition provides every stage that no argument replaces; as
    another argument, it provides only that stage. `dataclasses.replace(composition, keep=0.5)` changes all parts that
    have the budget of `scores`, and so do `budget`, `scope` and, for the part that allocates, `cap`.

    Raises:
        InputError: parts that do not fit together, or that would change nothing.
    """
    require_policy(scores)
    given = {"rank": rank, "allocate": allocate, "merge": merge, "step": step, "reduce": reduce, "store": store}
    for name, part in given.items():
        fits = part is None or isinstance(part, Policy) or (isinstance(part, type) and issubclass(part, Policy))
        if not fits:
            raise InputError(f"compose: {name}={part!r} must be a policy or a policy class")
    parts: dict[str, Any] = {}
    for name, part in given.items():
        if part is not None:
            shares = name in ("rank", "allocate", "merge", "step")
            made = _alike(part, scores) if shares else part() if isinstance(part, type) else part
            if shares and made.reducer is not None:
                raise InputError(f"compose: {type(made).__name__} reduces the prompt: give it as reduce=")
            parts[STAGES[name]] = _owner(made, STAGES[name])
    owners: dict[str, Any] = {"scored": _owner(scores, "scored"), "reduced": scores.reducer}
    if isinstance(scores, Composed):
        owners |= {field: getattr(scores, field) for field in (*STAGES.values(), "smoothed")}
    if smooth is not None:
        parts["smoothed"] = smooth
    check_bits([scores, *parts.values()])
    check_parts(owners, parts)
    common = {option: getattr(scores, option) for option in _COMMON}
    cap = (parts.get("allocated") or owners.get("allocated") or owners["scored"]).cap
    answer = scores.facts.answer if answer is None else answer
    return Composed(**{**owners, **parts}, **common, cap=cap, answer=answer)


def _owner(policy: Policy, field: str) -> Policy:
    """The policy that provides this stage of `policy`; it is never a composition."""
    return getattr(policy, field) or policy.scored if isinstance(policy, Composed) else policy


def _alike(part: Part, scores: Policy) -> Policy:
    """The part as a policy; raises InputError unless its budget and scope are those of `scores`."""
    common: dict[str, Any] = {option: getattr(scores, option) for option in _COMMON}
    made = part(**common) if isinstance(part, type) else part
    if any(getattr(made, field) != value for field, value in common.items()):
        needed = ", ".join(f"{field}={value!r}" for field, value in common.items() if value is not None)
        raise InputError(
            f"compose: {type(made).__name__} has another budget or scope than {type(scores).__name__}: give the class, "
            f"or {needed}"
        )
    return made


def _delegated(owner: str, name: str) -> Any:
    """A property: the attribute `name` of the policy in the field `owner`, or of `scored` if this is None."""
    return property(lambda self: getattr(getattr(self, owner) or self.scored, name))


class Composed(Policy):
    """The result of `compose`. Each stage is delegated to its owner, which is `scored` if the field is None.

    No owner is a composition.
    """

    scored: Policy
    ranked: Policy | None = None
    allocated: Policy | None = None
    merged: Policy | None = None
    stepped: Policy | None = None
    reduced: Policy | None = None
    stored: Policy | None = None
    smoothed: Smooth | None = None
    answer: Count = 0
    protect = _delegated("scored", "protect")
    merge = _delegated("merged", "merge")
    merges = _delegated("merged", "merges")
    updater = _delegated("stepped", "updater")
    softmax_n = _delegated("scored", "softmax_n")
    storage = _delegated("stored", "storage")
    total = _delegated("allocated", "total")

    def __post_init__(self) -> None:
        self._share_options()
        scored, allocator = self.scored.facts, self.allocated or self.scored
        ranker = (self.ranked or self.scored).facts
        facts = Facts(
            stages="composed",
            budgets=allocator.facts.budgets,
            capped=allocator.facts.capped and (ranker.capped or "rank" not in ranker.stages),
            selects=scored.selects,
            observes=scored.observes,
            needs_key=any(part.facts.needs_key for part in self.parts),
            counts_dropped=scored.counts_dropped and self.scored == self.reduced,
            uses=tuple(sorted({name for part in self.parts for name in part.facts.uses})),
            repeats=Composed.repeated if any(part.facts.repeats for part in self.parts) else None,
            across=Composed.connected if any(part.facts.across for part in self.parts) else None,
            measures=Composed.measured if any(part.facts.measures for part in self.parts) else None,
            recent=Composed.newest if scored.recent else None,
            answer=self.answer,
        )
        object.__setattr__(self, "facts", facts)
        super().__post_init__()
        if self.answer > 0:
            check_answer(self)

    def _share_options(self) -> None:
        """Gives the parts the options of the composition, which `dataclasses.replace` may have changed."""
        reduces_too = self.reduced == self.scored
        for name in _BUDGETED:
            if (part := getattr(self, name)) is None:
                continue
            wanted = {option: getattr(self, option) for option in _COMMON}
            if name == "allocated" or (name == "scored" and self.allocated is None):
                wanted["cap"] = self.cap
            changed = {option: value for option, value in wanted.items() if getattr(part, option) != value}
            if changed:
                object.__setattr__(self, name, dataclasses.replace(part, **changed))
        if reduces_too:
            object.__setattr__(self, "reduced", self.scored)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The owners that are not None."""
        parts = (self.scored, *(getattr(self, field) for field in STAGES.values()))
        return tuple(part for part in parts if part is not None)

    def measured(self, obs: Observation) -> dict[str, Measure]:
        """What the parts measure."""
        parts = (self.scored, self.ranked, self.allocated, self.stepped, self.reduced)  # the others do not observe
        given = (p.facts.measures(p, obs) for p in parts if p is not None and p.facts.measures is not None)
        return {name: measure for measures in given for name, measure in measures.items()}

    def newest(self, budget: Int[Array, "*K"]) -> Int[Array, "*K"]:
        """The number of recent tokens that `scored` keeps of these budgets."""
        assert self.scored.facts.recent is not None
        return self.scored.facts.recent(self.scored, budget)

    def repeated(self) -> tuple[int, ...]:
        """The instruction of the first part that repeats the prompt."""
        return next(part.facts.repeats(part) for part in self.parts if part.facts.repeats is not None)

    def connected(self, statistics: Statistics) -> Statistics:
        """The statistics after `Facts.across` of their owners."""
        if self.ranked is None and self.allocated is None:
            return _connected(self.scored, statistics)
        return {field: _connected(getattr(self, field), own) for field, own in statistics.items()}

    @property
    @override
    def follows_paper(self) -> bool:
        return all(part.follows_paper for part in self.parts)

    @override
    def score(self, obs: Observation) -> Float[Array, "K T"]:
        return self._smooth(checked_scores(self.scored, obs), obs)

    def _smooth(self, x: Float[Array, "K T"], obs: Observation) -> Float[Array, "K T"]:
        """Scores, or statistics, after smoothing among the tokens that compete with each other.

        Scores of tokens that are kept in any case say nothing about their neighbours: some methods give them none.
        """
        if self.smoothed is None:
            return x
        among, facts = obs.in_scope, self.scored.facts
        if self.scope == "all":
            among &= ~self.scored.protect(obs)
            if facts.recent is not None:
                among &= ~last(obs.in_scope, facts.recent(self.scored, obs.mean_budget))
        kinds = (among,) if facts.one_scale else (among & obs.is_vision, among & ~obs.is_vision)
        for kind in kinds:
            x = self.smoothed(x, dataclasses.replace(obs, in_scope=kind))
        return x

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """The statistics of `scored`, or, if others rank or allocate, of all of them, under the names of their fields.

        Only statistics that are ranked by are smoothed.
        """
        plain = scores if self.smoothed is None else checked_scores(self.scored, obs)
        found = {"scored": self.scored.statistics(obs, plain)} | {
            field: owner.statistics(obs, checked_scores(owner, obs))
            for field in ("ranked", "allocated")
            if (owner := getattr(self, field)) is not None
        }
        ranker = "scored" if self.ranked is None else "ranked"
        if self.smoothed is not None:
            by = (self.ranked or self.scored).facts.ranked_by
            found[ranker] |= {name: self._smooth(found[ranker][name], obs) for name in by if name != "scores"}
        return found if len(found) > 1 else found["scored"]

    def _owned(self, statistics: Statistics, field: str) -> Statistics:
        """The statistics of the owner of a stage."""
        if self.ranked is None and self.allocated is None:
            return statistics
        return statistics[field if getattr(self, field) is not None else "scored"]

    @override
    def allocate(
        self, statistics: Statistics, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, " L"] | Int[Array, "L K"]:
        owner, own = self.allocated or self.scored, self._owned(statistics, "allocated")
        return owner.allocate(own, total=total, most=most, layers=layers)

    @override
    def rank(
        self,
        scores: Float[Array, "K T"],
        statistics: Statistics,
        candidates: Bool[Array, " T"],
        count: Int[Array, " K"],
    ) -> tuple[Float[Array, "K T"], Int[Array, " K"]]:
        return (self.ranked or self.scored).rank(scores, self._owned(statistics, "ranked"), candidates, count)

    @property
    @override
    def reducer(self) -> ReducingStages | None:
        return None if self.reduced is None else self.reduced.reducer

    @override
    def check_model(self, layers: int) -> None:
        for part in self.parts:
            part.check_model(layers)
        if self.facts.across is not None and self.reducer is not None and any(self.reducer.reductions(layers)):
            one = next(part for part in self.parts if part.facts.across is not None)
            raise InputError(
                f"compose: {type(one).__name__} compares the tokens of successive layers, and "
                f"{type(self.reducer).__name__} drops tokens between them: leave out one of the two"
            )


def _connected(policy: Policy, statistics: Statistics) -> Statistics:
    return statistics if policy.facts.across is None else policy.facts.across(policy, statistics)


def at_keep(policy: Policy, keep: float) -> Policy:
    """The same policy with this `keep`, in place of its `keep` or `budget`.

    Raises:
        InputError: an option of the policy contradicts this keep.
    """
    return dataclasses.replace(policy, keep=keep, budget=None)  # type: ignore[type-var]  # a dataclass by its base class
