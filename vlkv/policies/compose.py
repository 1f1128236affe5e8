"""One method's scores, smoothed if asked, with another's budgets, merging, steps, shortening or storage."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from vlkv.errors import InputError
from vlkv.memory import Memory
from vlkv.observe import Observation
from vlkv.policies.full import Full
from vlkv.policies.policy import Policy, Statistics, Storage, checked_scores, policy, require_policy
from vlkv.policies.reducing import ReducingPolicy
from vlkv.policies.smooth import Smooth

Part = Policy | type[Policy]
_OWNERS = {"allocate": "allocated", "merge": "merged", "step": "stepped", "reduce": "reduced", "store": "stored"}


def compose(
    scores: Policy,
    *,
    allocate: Part | None = None,
    merge: Part | None = None,
    step: Part | None = None,
    reduce: Part | None = None,
    store: Part | None = None,
    smooth: Smooth | None = None,
) -> Composed:
    """A policy made of the stages of several.

        compose(SnapKV(keep=0.2), allocate=PrefixKV)                      SnapKV's scores, PrefixKV's budgets
        compose(AirCache(keep=0.1), reduce=LightKV(), store=KIVI(bits=4)) AirCache on what LightKV leaves, in 4 bits
        compose(SnapKV(keep=0.1, kernel=1), smooth=Smooth(9))             SnapKV with the mean over nine tokens

    Args:
        scores: ranks and protects; its `keep` or `budget` and its `scope` are those of the whole. Of a prompt that was
            shortened on its way they count what is left of it.
        allocate: hands out that budget, by its own scores.
        merge: folds what is dropped into what stays.
        step: acts while decoding.
        reduce: shortens the prompt while it is read; its own `keep` says by how much.
        store: how the pool is stored.
        smooth: changes what `scores` ranks by. Budgets and eviction while decoding see its scores as they are.

    A part is a policy, or a class for its defaults. A budget of its own (allocate, merge, step) must be the same.

    Compositions can be composed again. As `scores`, a composition gives every stage that no argument replaces; as
    another argument, it gives that one stage.

    Raises:
        InputError: parts that do not fit together.
    """
    require_policy(scores)
    given = {"allocate": allocate, "merge": merge, "step": step, "reduce": reduce, "store": store}
    for name, part in given.items():
        fits = part is None or isinstance(part, Policy) or (isinstance(part, type) and issubclass(part, Policy))
        if not fits:
            raise InputError(f"compose: {name}={part!r} is no policy: give one, or the class of one")
    parts: dict[str, Any] = {}
    for name, part in given.items():
        if part is not None:
            shares = name in ("allocate", "merge", "step")
            made = _alike(part, scores) if shares else part() if isinstance(part, type) else part
            if shares and made.reducer is not None:
                raise InputError(f"compose: {type(made).__name__} shortens the prompt: give it as reduce=")
            parts[_OWNERS[name]] = _owner(made, _OWNERS[name])
    owners: dict[str, Any] = {"scored": _owner(scores, "scored"), "reduced": scores.reducer}
    if isinstance(scores, Composed):
        owners |= {field: getattr(scores, field) for field in (*_OWNERS.values(), "smoothed")}
    if smooth is not None:
        parts["smoothed"] = smooth
    _check(owners, parts)
    if isinstance(scores, ReducingPolicy) and scores.reducer is not None:
        owners["scored"] = Full(scope="vision")  # it evicts nothing afterwards
    return Composed(**{**owners, **parts})


def _owner(policy: Policy, field: str) -> Policy:
    """The policy, itself no composition, that is responsible for this stage of `policy`."""
    return getattr(policy, field) or policy.scored if isinstance(policy, Composed) else policy


def _check(owners: dict[str, Any], parts: dict[str, Any]) -> None:
    """Raises InputError for a part that would do nothing, or something else than its stage.

    Args:
        owners: of the stages of the policy that scores.
        parts: those that replace them.
    """
    scores, reducer = owners["scored"], owners["reduced"]
    allocated, merged, stepped, reduced, stored = (parts.get(field) for field in _OWNERS.values())
    if merged is not None and not _merges(merged):
        raise InputError(f"compose: {type(merged).__name__} does not merge what another drops, with these options")
    if allocated is not None and scores.cap not in (None, allocated.cap):
        raise InputError(f"compose: {type(allocated).__name__} hands out the budget: give it the cap={scores.cap!r}")
    if stepped is not None and not stepped.acts:
        raise InputError(f"compose: {type(stepped).__name__} does nothing while decoding with these options")
    if stored is not None and stored.storage is None:
        raise InputError(f"compose: {type(stored).__name__} does not say how to store a pool")
    if reduced is not None and reduced.reducer is None:
        raise InputError(f"compose: {type(reduced).__name__} does not shorten the prompt")
    shortened = reduced or reducer
    judges = [part for part in (scores, allocated or owners.get("allocated")) if part != shortened]
    if shortened is not None and any(getattr(part, "variant", "paper") != "paper" for part in judges):
        raise InputError('compose: budgets of published code know whole prompts only: variant="paper" with reduce=')
    if reduced is not None and reducer is not None:
        raise InputError(f"compose: {type(reducer).__name__} and {type(reduced).__name__} both shorten the prompt")
    smoothed = parts.get("smoothed")
    if smoothed is not None and not isinstance(smoothed, Smooth):
        raise InputError(f"compose: smooth={smoothed!r} must be a Smooth, such as Smooth(9)")
    # Full is what `compose` puts in the place of a method that only shortens the prompt.
    evicts_nothing = isinstance(reducer, ReducingPolicy) and isinstance(scores, (ReducingPolicy, Full))
    if evicts_nothing and any(part is not None for part in (allocated, merged, smoothed)):
        raise InputError(
            f"compose: after {type(reducer).__name__} nothing is evicted, so there is nothing to allocate, merge or "
            "smooth: give it as reduce= of a method that evicts"
        )
    if smoothed is not None and isinstance(scores, Full):
        raise InputError("compose: Full keeps every token, so there is nothing to smooth")


def _merges(part: Policy) -> bool:
    """Whether it folds what is dropped into what stays, whoever drops it."""
    overrides = type(part).merge is not Policy.merge and not isinstance(part, ReducingPolicy)
    return overrides and getattr(part, "merging", True) not in ("none", 0)


def _alike(part: Part, scores: Policy) -> Policy:
    """The part with the budget and scope of the whole."""
    common: dict[str, Any] = {"keep": scores.keep, "budget": scores.budget, "scope": scores.scope}
    made = part(**common) if isinstance(part, type) else part
    if any(getattr(made, field) != value for field, value in common.items()):
        asked = ", ".join(f"{field}={value!r}" for field, value in common.items() if value is not None)
        raise InputError(
            f"compose: {type(made).__name__} asks for another budget or scope than {type(scores).__name__}: give the "
            f"class, or {asked}"
        )
    return made


@policy
class Composed(Policy):
    """What `compose` returns: the owner of every stage, none of them a composition. None: the stage of `scored`."""

    scored: Policy
    allocated: Policy | None = None
    merged: Policy | None = None
    stepped: Policy | None = None
    reduced: Policy | None = None
    stored: Policy | None = None
    smoothed: Smooth | None = None
    stages = "composed"

    def __post_init__(self) -> None:
        for field in ("keep", "budget", "scope"):
            object.__setattr__(self, field, getattr(self.scored, field))
        object.__setattr__(self, "cap", (self.allocated or self.scored).cap)
        super().__post_init__()

    @property
    def parts(self) -> tuple[Policy, ...]:
        """All that were given."""
        parts = (self.scored, self.allocated, self.merged, self.stepped, self.reduced, self.stored)
        return tuple(part for part in parts if part is not None)

    @property
    def capped(self) -> bool:  # type: ignore[override]
        """If budgets differ per layer, every order is one of scores alone, and nothing is merged."""
        ranks = type(self.scored).rank is Policy.rank or self.scored.capped
        return (self.allocated or self.scored).capped and ranks and not _merges(self.merged or self.scored)

    @property
    def needs_key(self) -> bool:  # type: ignore[override]
        """If one of them does."""
        return any(part.needs_key for part in self.parts)

    @property
    def needs_grid(self) -> bool:  # type: ignore[override]
        """If one of them does."""
        return any(part.needs_grid for part in (*self.parts, self.smoothed) if part is not None)

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """As `scored`, smoothed."""
        scores = checked_scores(self.scored, obs)
        return scores if self.smoothed is None else self.smoothed(scores, obs)

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """As `scored`."""
        return self.scored.protect(obs)

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """Those of `scored`; or, if another method allocates, of both, each under the name of its field.

        Smoothing changes only those that `scored` ranks by.
        """
        own = self.scored.statistics(obs, scores if self.smoothed is None else self.scored.score(obs))
        if self.smoothed is not None:
            own |= {name: self.smoothed(own[name], obs) for name in self.scored.ranked_by}
        if self.allocated is None:
            return own
        return {"scored": own, "allocated": self.allocated.statistics(obs, checked_scores(self.allocated, obs))}

    def allocate(
        self, statistics: Statistics, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, " L"] | Int[Array, "L K"]:
        """As `allocated`."""
        if self.allocated is None:
            return self.scored.allocate(statistics, total=total, most=most, layers=layers)
        return self.allocated.allocate(statistics["allocated"], total=total, most=most, layers=layers)

    def rank(
        self,
        scores: Float[Array, "K T"],
        statistics: Statistics,
        candidates: Bool[Array, " T"],
        count: Int[Array, " K"],
    ) -> tuple[Float[Array, "K T"], Int[Array, " K"]]:
        """As `scored`."""
        own = statistics if self.allocated is None else statistics["scored"]
        return self.scored.rank(scores, own, candidates, count)

    def merge(
        self,
        k: Float[Array, "K T H"],
        v: Float[Array, "K T H"],
        kept: Bool[Array, "K T"],
        scores: Float[Array, "K T"],
    ) -> tuple[Float[Array, "K T H"], Float[Array, "K T H"]]:
        """As `merged`."""
        return (self.merged or self.scored).merge(k, v, kept, scores)

    @property
    def reducer(self) -> Policy | None:
        """`reduced`."""
        return self.reduced

    @property
    def acts(self) -> bool:
        """As `stepped`."""
        return (self.stepped or self.scored).acts

    @property
    def evicts(self) -> bool:
        """As `stepped`."""
        return (self.stepped or self.scored).evicts

    def decode_slots(self, memory: Memory) -> Int[Array, " K"]:
        """As `stepped`."""
        return (self.stepped or self.scored).decode_slots(memory)

    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int]:
        """As `stepped`."""
        return (self.stepped or self.scored).decode_bounds(
            kept, longest, layers=layers, vision=vision, text=text, new_tokens=new_tokens
        )

    def remember(self, obs: Observation, scores: Float[Array, "K T"]) -> dict[str, Float[Array, "K T"]]:
        """What `stepped` wants to find, of its own scores, which are not smoothed."""
        if self.stepped is None and self.smoothed is None:
            return self.scored.remember(obs, scores)
        owner = self.stepped or self.scored
        return owner.remember(obs, checked_scores(owner, obs))

    def begin(self, memory: Memory) -> Memory:
        """As `stepped`."""
        return (self.stepped or self.scored).begin(memory)

    def step(self, memory: Memory, mass: Float[Array, "N E"]) -> Memory:
        """As `stepped`."""
        return (self.stepped or self.scored).step(memory, mass)

    @property
    def softmax_n(self) -> float:
        """As `scored`."""
        return self.scored.softmax_n

    @property
    def storage(self) -> Storage | None:
        """As `stored`."""
        return (self.stored or self.scored).storage

    def total(self, counts: Int[Array, " L"], seen: Int[Array, ""], *, layers: int, most: int) -> Int[Array, ""]:
        """As the part that allocates; of a prompt that another one shortened, a share of what is left."""
        if self.reduced is None:
            return (self.allocated or self.scored).total(counts, seen, layers=layers, most=most)
        if self.reduced == self.scored:
            return self.scored.total(counts, seen, layers=layers, most=most)
        return super().total(counts, seen, layers=layers, most=most)

    def vision_bounds(self, *, layers: int, vision: int, images: int) -> tuple[int, ...]:
        """As `reduced` leaves them."""
        return (self.reduced or self.scored).vision_bounds(layers=layers, vision=vision, images=images)

    def bound(self, *, layers: int, vision: int, text: int, images: int = 1) -> int:
        """As `total`."""
        if self.reduced is None:
            return (self.allocated or self.scored).bound(layers=layers, vision=vision, text=text, images=images)
        if self.reduced == self.scored:
            return self.scored.bound(layers=layers, vision=vision, text=text, images=images)
        return super().bound(layers=layers, vision=vision, text=text, images=images)

    def layer_bound(self, *, layers: int, vision: int, text: int) -> int:
        """Known where the budgets are those of `scored`."""
        if self.allocated is None and self.reduced is None:
            return self.scored.layer_bound(layers=layers, vision=vision, text=text)
        return vision + text

    def check_model(self, layers: int) -> None:
        """Every part is asked."""
        for part in self.parts:
            part.check_model(layers)

    def options(self) -> dict[str, Any]:
        """The parts by stage, each with its name and options."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        options: dict[str, Any] = {
            name: {"policy": type(part).__name__, **part.options()}
            for name, part in named.items()
            if isinstance(part, Policy)
        }
        return options if self.smoothed is None else options | {"smoothed": dataclasses.asdict(self.smoothed)}
