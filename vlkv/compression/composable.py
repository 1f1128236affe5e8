"""Checks that the parts of a composition fit together, and that each of them changes something."""

from __future__ import annotations

from typing import Any

from vlkv.compression.policy import Policy, ReducingStages
from vlkv.compression.smooth import Smooth
from vlkv.errors import InputError

STAGES = {
    "rank": "ranked", "allocate": "allocated", "merge": "merged", "step": "stepped", "reduce": "reduced",
    "store": "stored",
}  # fmt: skip


def check_parts(owners: dict[str, Any], parts: dict[str, Any]) -> None:
    """Raises InputError for a part that has no effect, or that affects other stages.

    Args:
        owners: owners of the stages of `scores`.
        parts: policies that replace them.
    """
    scores, reducer = owners["scored"], owners["reduced"]
    ranked, allocated, merged, stepped, reduced, stored = (parts.get(field) for field in STAGES.values())
    if ranked is not None and (not _changes(ranked, "rank") or "scores" not in ranked.facts.ranked_by):
        raise InputError(f"compose: {type(ranked).__name__} does not rank by the scores of other methods "
                         "with these options")  # fmt: skip
    merger = merged or owners.get("merged") or scores
    if (ranked or owners.get("ranked") or parts.get("smoothed") or owners.get("smoothed")) and (
        not merger.facts.follows_kept and merger.reducer is None
    ):
        raise InputError(
            f"compose: {type(merger).__name__} merges in its own order, so only its own scores can choose the tokens: "
            "leave out rank= and smooth=, or give another merge="
        )
    if merged is not None and not merged.merges:
        raise InputError(f"compose: {type(merged).__name__} with these options does not merge for other methods")
    if allocated is not None and scores.cap not in (None, allocated.cap):
        raise InputError(f"compose: {type(allocated).__name__} allocates the budget: give it the cap={scores.cap!r}")
    if stepped is not None and stepped.updater is None:
        raise InputError(f"compose: {type(stepped).__name__} with these options does nothing while decoding")
    if stored is not None and stored.storage is None:
        raise InputError(f"compose: {type(stored).__name__} does not quantise the pool")
    if reduced is not None and reduced.reducer is None:
        raise InputError(f"compose: {type(reduced).__name__} does not reduce the prompt")
    reducing = reduced or reducer
    budgeting = [part for part in (scores, allocated or owners.get("allocated")) if part not in (None, reducing)]
    if reducing is not None and not all(part.follows_paper for part in budgeting):
        raise InputError('compose: budgets of published code do not support reduced prompts: use variant="paper"')
    if reduced is not None and reducer is not None:
        raise InputError(f"compose: {type(reducer).__name__} and {type(reduced).__name__} both reduce the prompt")
    _check_repetition([part for part in {**owners, **parts}.values() if isinstance(part, Policy)], reducing)
    smoothed = parts.get("smoothed")
    if smoothed is not None and not isinstance(smoothed, Smooth):
        raise InputError(f"compose: smooth={smoothed!r} must be a Smooth, such as Smooth(9)")
    if not _evicts(scores) and any(part is not None for part in (ranked, allocated, merged, smoothed)):
        if reducer is None:
            raise InputError(f"compose: {type(scores).__name__} keeps every token, so there is nothing to smooth, "
                             "rank, allocate or merge: leave these parts out")  # fmt: skip
        raise InputError(f"compose: {type(reducer).__name__} evicts nothing, so there is nothing to rank, allocate, "
                         "merge or smooth: give it as reduce= of a method that evicts")  # fmt: skip
    _check_effects(owners, parts)


def _check_effects(owners: dict[str, Any], parts: dict[str, Any]) -> None:
    """Raises InputError for a part that would change nothing."""
    for stage, field in STAGES.items():
        part, before = parts.get(field), owners.get(field) or owners["scored"]
        if part is not None and part == before and stage not in ("reduce", "store"):
            raise InputError(f"compose: {stage}={type(part).__name__} changes nothing, because the stage is already "
                             "its own: leave it out")  # fmt: skip
    allocated, before = parts.get("allocated"), owners.get("allocated") or owners["scored"]
    if allocated is not None and not _changes(allocated, "allocate") and not _changes(before, "allocate"):
        raise InputError(f"compose: {type(allocated).__name__} with these options gives equal budgets, as "
                         f"{type(before).__name__} does: leave out allocate=")  # fmt: skip
    smooth = parts.get("smoothed")
    if isinstance(smooth, Smooth) and smooth.kernel in (1, (1, 1)):
        raise InputError(f"compose: smooth={smooth!r} changes nothing: give a larger kernel, or leave it out")
    if smooth is not None and "smooth" in _idle(parts.get("ranked") or owners.get("ranked") or owners["scored"]):
        raise InputError(f"compose: smoothing does not change the order of {type(owners['scored']).__name__}: leave "
                         "out smooth=")  # fmt: skip


def _idle(policy: Policy) -> tuple[str, ...]:
    """The stages that would change nothing with these options."""
    return () if policy.facts.idle is None else policy.facts.idle(policy)


def _changes(policy: Policy, stage: str) -> bool:
    """Whether the policy with these options changes a stage."""
    return stage in policy.facts.stages and stage not in _idle(policy)


def _evicts(policy: Policy) -> bool:
    """Whether entries are evicted after prefill: a method that could reduce the prompt may evict them instead."""
    return policy.facts.selects or (isinstance(policy, ReducingStages) and policy.reducer is None)


def check_bits(parts: list[Any]) -> None:
    """Raises InputError if a method that divides bits among all entries would share its stages with others."""
    for part in parts if parts[1:] else ():
        if isinstance(part, Policy) and part.facts.budgets == "bits":
            raise InputError(f"compose: {type(part).__name__} divides the bits of all entries in one stage: use it "
                             "without other parts")  # fmt: skip


def _check_repetition(parts: list[Policy], reducing: Policy | None) -> None:
    """Raises InputError if a prompt would be both repeated and reduced, or repeated after several instructions."""
    instructions = {part.facts.repeats(part) for part in parts if part.facts.repeats is not None}
    if reducing is not None and instructions:
        raise InputError(f"compose: {type(reducing).__name__} reduces the prompt, so it cannot be repeated")
    if len(instructions) > 1:
        raise InputError("compose: the parts repeat the prompt after different instructions: give them the same one")


def check_answer(policy: Any) -> None:
    """Raises InputError unless the scores can wait for tokens of the answer, and observe them."""
    name, asked = type(policy.scored).__name__, f"compose: answer={policy.answer!r}"
    if policy.reducer is not None:
        name = type(policy.reducer).__name__
        raise InputError(f"{asked}: {name} reduces the prompt before there is an answer: leave out one of the two")
    if policy.facts.repeats is not None:
        raise InputError(f"{asked}: {name} repeats the prompt before there is an answer: leave out answer=")
    if policy.updater is not None:
        name = type(policy.updater).__name__
        raise InputError(f"{asked}: {name} updates the cache while decoding, from the first token on: leave out "
                         "answer=, or give options without updates")  # fmt: skip
    if not policy.facts.observes:
        raise InputError(f"{asked}: the scores of {name} depend on no queries, so observing the answer would change "
                         "nothing: leave out answer=")  # fmt: skip
