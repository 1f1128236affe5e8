"""Combines the scores of one method with the budgets, merging, decode steps, reduction or storage of others."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlkv.compression.checking import require_policy
from vlkv.compression.policy import Policy
from vlkv.compression.slots import NUMBERS, Composed, Slots, slots_of
from vlkv.compression.smooth import Smooth
from vlkv.compression.stages import fills, stage_of
from vlkv.errors import InputError

Part = Policy | type[Policy]
SHARED = ("rank", "allocate", "merge", "step")  # parts that must have the budget and scope of `scores`
# The end of the error message for a part without the stage for which it is given.
_UNFILLED = {
    "rank": "does not rank by the scores of other methods with these options",
    "merge": "with these options does not merge for other methods",
    "step": "with these options does nothing while decoding",
    "store": "does not quantise the pool",
    "reduce": "does not reduce the prompt",
}


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
    every: int | None = None,
    first: int | None = None,
) -> Composed:
    """A policy with stages of several methods, or one that compresses later.

        compose(SnapKV(keep=0.2), allocate=PrefixKV)                      SnapKV's scores, PrefixKV's budgets
        compose(AirCache(keep=0.1), reduce=LightKV(), store=KIVI(bits=4)) LightKV, then AirCache, stored in 4 bits
        compose(SnapKV(keep=0.1, kernel=1), smooth=Smooth(9))             SnapKV with the mean over nine tokens
        compose(H2O(keep=0.2), rank=CriticalKV)                           CriticalKV's second stage, with H2O's scores
        compose(SnapKV(keep=0.1), answer=8)                               SnapKV, which observes eight more tokens
        compose(SnapKV(budget=256), every=64)                             256 entries, however long the answer is

    Args:
        scores: scores and protects tokens. Its `keep` or `budget` and its `scope` are those of the composition. If the
            prompt is reduced, they refer to the tokens that are left.
        rank: ranks the tokens of a layer by the scores of `scores` and by its own statistics.
        allocate: divides the budget among layers and heads, by its own scores and statistics.
        merge: merges dropped entries into kept ones.
        step: updates the cache while decoding.
        reduce: reduces the prompt during prefill, with its own `keep`.
        store: quantises the pool. RDKV, which divides bits, also ranks and allocates, by the scores of `scores`.
        smooth: smooths the scores of `scores` for ranking, and statistics by which `rank` ranks. Budgets and decode
            steps use the scores without smoothing. Tokens that are kept in any case are not averaged.
        answer: number of tokens of the answer that are decoded with the full cache. The method observes them too, and
            then the entries of the prompt are compressed. 0: they are compressed after prefill; None: the number of
            `scores`, which is 0 unless it is a composition.
        every: number of new tokens after which the entries of the cache are selected again. It then keeps `budget`
            entries, or with `keep` as many as of the prompt. 0: new tokens stay; None: the number of `scores`.
        first: number of the first tokens of the prompt that are always kept, such as a system prompt.

    A part is a policy, or a class, which is used with the default values of its options. Parts for rank, allocate,
    merge and step, and RDKV as store, must have the same budget and scope as `scores`.

    Compositions can be composed again. As `scores`, a composition provides every stage that no argument replaces; as
    another argument, it provides only that stage. `dataclasses.replace(composition, keep=0.5)` changes all parts that
    have the budget of `scores`, and so do `budget`, `scope` and, for the part that allocates, `cap`.

    Raises:
        InputError: parts that do not fit together, or that would change nothing.
    """
    require_policy(scores)
    arguments = {"rank": rank, "allocate": allocate, "merge": merge, "step": step, "reduce": reduce, "store": store}
    parts = _with_all_of_bits({name: _owner(name, x, scores) for name, x in arguments.items() if x is not None})
    settings = {"smooth": smooth, "answer": answer, "every": every, "first": first}
    parts |= {name: value for name, value in settings.items() if value is not None}
    slots = dataclasses.replace(slots_of(scores), **parts)
    _check(scores, slots, parts)
    common = {option: getattr(scores, option) for option in ("keep", "budget", "scope")}
    return Composed(slots=slots, cap=slots.allocate.cap, **common)


def _check(scores: Policy, slots: Slots, parts: dict[str, Any]) -> None:
    """Raises InputError if the parts do not fit together, or if one would change nothing.

    Args:
        scores: argument of `compose`.
        slots: those of the result.
        parts: the other arguments by name, each replaced by the method that fills the slot.
    """
    before = slots_of(scores)
    for name in NUMBERS:
        value = getattr(slots, name)
        _require(type(value) is int and value >= 0, f"{name}={value!r} must be a whole number of at least 0")
    _require(not slots.first or scores.scope == "all", 'with scope="vision" all text is kept: leave out first=')
    fits = scores.budget is None or slots.first < scores.budget
    _require(fits, f"first={slots.first} leaves nothing of budget={scores.budget}: give a larger budget")
    _require(not (slots.answer and slots.every), "answer= and every= both compress during the answer: give one of them")
    _check_needs(slots)
    _check_prompt(slots)
    if "reduce" in parts:
        once = before.reduce is None
        _require(once, f"{_name(before.reduce)} and {_name(slots.reduce)} both reduce the prompt")
    if "allocate" in parts:
        capped = scores.cap in (None, slots.allocate.cap)
        _require(capped, f"{_name(slots.allocate)} allocates the budget: give it the cap={scores.cap!r}")
    _check_effects(before, slots, parts)
    if slots.answer > 0:
        _check_answer(slots)


def _owner(name: str, part: Any, scores: Policy) -> Policy:
    """The method that fills the slot `name` in a part, which may itself be a composition."""
    if not (isinstance(part, Policy) or (isinstance(part, type) and issubclass(part, Policy))):
        raise InputError(f"compose: {name}={part!r} must be a policy or a policy class")
    common: dict[str, Any] = {option: getattr(scores, option) for option in ("keep", "budget", "scope")}
    shared = name in SHARED or (name == "store" and _divides_bits(part))
    if isinstance(part, type):
        part = part(**common) if shared else part()
    slots = slots_of(part)
    if shared:
        needed = ", ".join(f"{option}={value!r}" for option, value in common.items() if value is not None)
        alike = all(getattr(part, option) == value for option, value in common.items())
        _require(alike, f"{_name(part)} has another budget or scope than {_name(scores)}: give the class, or {needed}")
        _require(slots.reduce is None, f"{_name(part)} reduces the prompt: give it as reduce=")
    owner = getattr(slots, name)
    fits = owner is not None
    if name == "rank":
        fits = fills(owner, "rank") and "scores" in stage_of(owner, "ranked_by")
    if name == "merge":
        fits = fits and "own order" not in stage_of(owner, "needs")
    # Any method can allocate, if only equal budgets; `_check_effects` refuses these where they change nothing.
    _require(fits or name == "allocate", f"{_name(owner or part)} {_UNFILLED.get(name)}")
    return owner


def _divides_bits(part: Any) -> bool:
    return bool(part.facts.budgets == "bits")


def _with_all_of_bits(parts: dict[str, Any]) -> dict[str, Any]:
    """The parts, in which a method that divides bits also ranks and allocates: they decide which entries there are."""
    store = parts.get("store")
    return {"rank": store, "allocate": store} | parts if store is not None and _divides_bits(store) else parts


def _require(ok: bool, rule: str) -> None:
    if not ok:
        raise InputError(f"compose: {rule}")


def _name(policy: Policy | None) -> str:
    return type(policy).__name__


def _check_needs(slots: Slots) -> None:
    """Raises InputError if a composition does not meet a method's conditions (`Stages.needs`).

    `require_layers` checks "same tokens", which depends on the model.
    """
    for owner in slots.owners:
        needs, name = stage_of(owner, "needs"), _name(owner)
        divides = slots.rank == slots.allocate == slots.store == owner
        _require(
            (divides and not (slots.merge or slots.step or slots.reduce)) or "own bits" not in needs,
            f"{name} divides the bits of all entries: give it as store=, without rank=, allocate=, merge=, step= or "
            "reduce=",
        )
        ordered = owner != slots.merge or (owner == slots.score == slots.rank and slots.smooth is None)
        _require(
            ordered or "own order" not in needs,
            f"{name} merges in its own order, so only its own scores can choose the tokens: leave out rank= and "
            "smooth=, or give another merge=",
        )
        unreduced = owner not in (slots.score, slots.allocate) or slots.reduce in (None, owner)
        _require(
            unreduced or "whole prompt" not in needs,
            'budgets of published code do not support reduced prompts: use variant="paper"',
        )


def _check_prompt(slots: Slots) -> None:
    """Raises InputError if a prompt would be both repeated and reduced, or repeated after several instructions."""
    instructions = {ids for owner in slots.owners if (ids := stage_of(owner, "repeats")) is not None}
    once = slots.reduce is None or not instructions
    _require(once, f"{_name(slots.reduce)} reduces the prompt, so it cannot be repeated")
    _require(len(instructions) <= 1, "the parts repeat the prompt after different instructions: give them the same one")


def _check_effects(before: Slots, slots: Slots, parts: dict[str, Any]) -> None:
    """Raises InputError for a part that would change nothing."""
    smooth, scores = parts.get("smooth"), before.score
    if smooth is not None and not isinstance(smooth, Smooth):
        raise InputError(f"compose: smooth={smooth!r} must be a Smooth, such as Smooth(9)")
    evicts = before.evicts
    selecting = parts.keys() & {"rank", "allocate", "merge", "smooth"}
    if not evicts and selecting and before.reduce is None:
        raise InputError(f"compose: {_name(scores)} keeps every token, so there is nothing to smooth, rank, allocate "
                         "or merge: leave these parts out")  # fmt: skip
    if not evicts and selecting:
        raise InputError(f"compose: {_name(before.reduce)} evicts nothing, so there is nothing to rank, allocate, "
                         "merge or smooth: give it as reduce= of a method that evicts")  # fmt: skip
    for name in (slot for slot in SHARED if slot in parts):
        changed = parts[name] != getattr(before, name)
        text = "changes nothing, because the stage is already its own: leave it out"
        _require(changed, f"{name}={_name(parts[name])} {text}")
    if "allocate" in parts:
        _require(
            fills(slots.allocate, "allocate") or fills(before.allocate, "allocate"),
            f"{_name(slots.allocate)} with these options gives equal budgets, as {_name(before.allocate)} does: leave "
            "out allocate=",
        )
    if smooth is not None:
        wide = smooth.kernel not in (1, (1, 1))
        _require(wide, f"smooth={smooth!r} changes nothing: give a larger kernel, or leave it out")
        orders = "smooth" not in stage_of(slots.rank, "idle")
        _require(orders, f"smoothing does not change the order of {_name(scores)}: leave out smooth=")


def _check_answer(slots: Slots) -> None:
    """Raises InputError unless the scores can wait for tokens of the answer, and observe them."""
    asked, name = f"answer={slots.answer!r}", _name(slots.score)
    _require(
        slots.reduce is None,
        f"{asked}: {_name(slots.reduce)} reduces the prompt before there is an answer: leave out one of the two",
    )
    _require(slots.repeats is None, f"{asked}: {name} repeats the prompt before there is an answer: leave out answer=")
    _require(
        slots.step is None,
        f"{asked}: {_name(slots.step)} updates the cache while decoding, from the first token on: leave out answer=, "
        "or give options without updates",
    )
    _require(
        slots.score.facts.observes,
        f"{asked}: the scores of {name} depend on no queries, so observing the answer would change nothing: leave out "
        "answer=",
    )


def at_keep(policy: Policy, keep: float) -> Policy:
    """The same policy with this `keep`, in place of its `keep` or `budget`.

    Raises:
        InputError: an option of the policy contradicts this keep.
    """
    return dataclasses.replace(policy, keep=keep, budget=None)  # type: ignore[type-var]  # a dataclass by its base class
