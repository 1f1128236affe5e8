"""What a policy is: a frozen dataclass without leaves, and the stages it may change.

Stages are unbatched (vmapped over B outside). A method overrides the few it needs; a user's own subclass, decorated
with `policy` and defined anywhere, works like ours.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets
from vlkv.errors import InputError
from vlkv.memory import Memory
from vlkv.observe import Observation
from vlkv.tokens import Tokens

Scope = Literal["vision", "all"]
Statistics = dict[str, Any]  # arrays by name; a composition has a dictionary of them for each method
P = TypeVar("P")


class Storage(NamedTuple):
    """How the pool is stored (KIVI): `bits` per number, a scale and a minimum for every `group` of them.

    `window`: how many of the last generated tokens attention sees in full precision; None: all of them.
    """

    bits: int
    group: int
    window: int | None = None


@dataclass_transform(frozen_default=True, kw_only_default=True)
def policy(cls: type[P]) -> type[P]:
    """Makes a class a frozen, keyword-only dataclass that jit treats as static: no leaves, equal by value."""
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    jax.tree_util.register_static(made)
    return made


class _PolicyType(type):
    """The type of policy classes. Static for jit too, so that a class that is passed by mistake meets our own error."""


jax.tree_util.register_static(_PolicyType)


@policy
class Policy(metaclass=_PolicyType):
    """The base: keeps a share of the tokens in scope, ranked by `score`, the same number in every layer.

    Attributes:
        keep: fraction of the tokens in scope that survives, in (0, 1].
        budget: instead of `keep`, the mean number of surviving tokens in scope per layer and head.
        scope: "vision" keeps all text and spends the budget on vision tokens; "all" counts every token.
        cap: for methods whose budgets differ per layer: a layer gets at most this many times the mean budget (at least
            1), and only that many of its entries live on until all layers have been read. So the uncompressed cache of
            all layers need not exist at once; what a layer would have had above the cap goes to the others.
    """

    keep: float | None = None
    budget: int | None = None
    scope: Scope = "all"
    cap: float | None = None

    paper: ClassVar[str] = ""
    equations: ClassVar[str] = ""
    stages: ClassVar[str] = "score"
    capped: ClassVar[bool] = False  # whether `cap` has a meaning: budgets differ per layer, nothing is merged
    shortens_by: ClassVar[str] = "layers"  # the option that says after which layers
    needs_key: ClassVar[bool] = False  # whether `generate` and `select` must be given a key
    needs_grid: ClassVar[bool] = False  # whether `select` must be told where on an image each token lies
    ranked_by: ClassVar[tuple[str, ...]] = ()  # statistics per head and token that `rank` goes by instead of the scores

    def __post_init__(self) -> None:
        name = type(self).__name__
        if jax.tree_util.all_leaves([self]):
            raise InputError(f"{name}: write @policies.policy above the class, or jit cannot take it as static")
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, default = getattr(self, field.name), field.default
            if value is None and "None" in str(field.type):
                continue
            if "bool" not in str(field.type):  # which Python counts among the whole numbers
                parts = value if isinstance(value, tuple) else (value,)
                self.check(field.name, not any(isinstance(part, bool) for part in parts), "must not be True or False")
            if isinstance(default, bool):
                self.check(field.name, isinstance(value, bool), "must be True or False")
            elif isinstance(default, int):
                self.check(field.name, isinstance(value, int), "must be a whole number")
            elif isinstance(default, float) and "Literal" not in str(field.type):
                self.check(field.name, _is_number(value), "must be a number")
        if (self.keep is None) == (self.budget is None):
            raise InputError(f"{name}: give keep= (a fraction) or budget= (tokens per layer), one of the two")
        if self.keep is not None and not (_is_number(self.keep) and 0 < self.keep <= 1):
            raise InputError(f"{name}: keep={self.keep!r} must lie in (0, 1]")
        if self.budget is not None and not (isinstance(self.budget, int) and self.budget >= 1):
            raise InputError(f"{name}: budget={self.budget!r} must be a whole number of at least 1")
        self.check("scope", self.scope in ("vision", "all"), 'must be "vision" or "all"')
        self.check("cap", self.cap is None or (_is_number(self.cap) and self.cap >= 1), "must be at least 1")
        self.check("cap", self.cap is None or self.capped, "is for methods whose budgets differ per layer")

    def check(self, field: str, ok: bool, rule: str) -> None:
        """Raises InputError naming the option unless `ok`."""
        if not ok:
            raise InputError(f"{type(self).__name__}: {field}={getattr(self, field)!r} {rule}")

    # --- stages -------------------------------------------------------------------------------------------------

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """How much each token in scope deserves to stay; higher is better. Values out of scope do not matter."""
        raise NotImplementedError

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """Tokens that stay whatever their score and count against the budget; if that is short, the latest stay.

        Asked only under scope="all": under "vision" the budget goes by scores alone, since sinks and recent tokens
        are usually text, which stays anyway.
        """
        return jnp.zeros_like(obs.valid)

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """What `allocate` needs to know of this layer."""
        del obs, scores
        return {}

    def allocate(
        self, statistics: Statistics, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, " L"] | Int[Array, "L K"]:
        """Budgets per layer (or per layer and head) that sum to `total` per head, each between min(1, most) and most.

        `select` refuses budgets that pass these bounds. Under jit nothing can be raised: there they are cut, in the
        upper layers if their sum is too large.

        `statistics` has a leading axis L; `most` is the number of tokens in scope that each layer holds, the same for
        all unless the prompt got shorter on its way.
        """
        del statistics, layers
        return budgets.uniform(total, most)

    def rank(
        self,
        scores: Float[Array, "K T"],
        statistics: Statistics,
        candidates: Bool[Array, " T"],
        count: Int[Array, " K"],
    ) -> tuple[Float[Array, "K T"], Int[Array, " K"]]:
        """The last word on one layer, for methods whose order depends on how much the layer was granted.

        Args:
            scores: what `score` returned.
            statistics: of this layer.
            candidates: tokens in scope that are not protected.
            count: how many of them may stay, per head.

        Returns:
            What to rank the candidates by, and how many to take: `count`, or fewer where a method leaves some unspent.
        """
        del statistics, candidates
        return scores, count

    def merge(
        self,
        k: Float[Array, "K T H"],
        v: Float[Array, "K T H"],
        kept: Bool[Array, "K T"],
        scores: Float[Array, "K T"],
    ) -> tuple[Float[Array, "K T H"], Float[Array, "K T H"]]:
        """The entries that go into the cache where `kept`; a method may fold what it drops into them."""
        del kept, scores
        return k, v

    # --- stages while the prompt is read, for methods that shorten it -----------------------------------------------

    @property
    def reducer(self) -> Policy | None:
        """The part of the policy that must be known before a prompt is read; None: the prompt stays whole."""
        return None if type(self).reductions is Policy.reductions else self

    def reductions(self, layers: int) -> tuple[int, ...]:
        """After how many layers `reduce` is asked, upwards; 0: before the first."""
        del layers
        return ()

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
        """The hidden states that go on, and which tokens stay; a method may fold what it drops into them.

        Args:
            tokens: after the layer, or before the first.
            obs: that layer's attention; None before the first.
            stage: index into `reductions`.
        """
        del obs, stage
        return tokens, tokens.valid

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """The most vision tokens that leave a stage which at most `vision` tokens of so many images enter.

        `read_prompt` refuses a `reduce` that keeps more. Under jit nothing can be raised: there the last of the vision
        tokens go, and all text stays.
        """
        del stage, images
        return vision

    @property
    def forgets(self) -> bool:
        """Whether tokens dropped by `reduce` leave the caches of earlier layers too."""
        return False

    @property
    def watches(self) -> tuple[int, ...]:
        """Blocks of the vision tower whose class token's attention `reduce` wants to see."""
        return ()

    # --- stages while decoding, for methods whose `acts` is true --------------------------------------------------

    @property
    def acts(self) -> bool:
        """Whether the method does anything after prefill; if not, decoding takes a shorter path."""
        return False

    def remember(self, obs: Observation, scores: Float[Array, "K T"]) -> dict[str, Float[Array, "K T"]]:
        """Numbers per prompt token that `begin` and `step` want to find in the memory of the kept ones."""
        del obs, scores
        return {}

    @property
    def evicts(self) -> bool:
        """Whether `step` lets entries go, so that new ones can take their slots. If not, new ones go to a tail."""
        return False

    def begin(self, memory: Memory) -> Memory:
        """Once, after prefill and before packing: what it lets go takes no slot."""
        return memory

    def step(self, memory: Memory, mass: Float[Array, "N E"]) -> Memory:
        """After each step's attention; `mass` is the share of it that every entry received."""
        del mass
        return memory

    def decode_slots(self, memory: Memory) -> Int[Array, " K"]:
        """Slots of a segment of a method that `evicts`: the most entries that it ever holds, an arriving one included.

        `memory` is as `begin` leaves it, `memory.new_tokens` the most tokens that may follow. A segment that is full
        loses its oldest entry if `step` lets nothing go.
        """
        return memory.capacity + 1

    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int]:
        """Bounds on `decode_slots`, of all layers together and of one.

        Args:
            kept: `bound` of such a prompt.
            longest: its `layer_bound`.
            layers: L.
            vision: the most vision tokens of a prompt.
            text: its most text tokens.
            new_tokens: the most tokens that may follow.
        """
        del vision, text, new_tokens
        return kept + layers, longest + 1

    @property
    def softmax_n(self) -> float:
        """The n of n-softmax in decode attention (CSP, Eq. 7)."""
        return 0.0

    @property
    def storage(self) -> Storage | None:
        """How the pool is quantised; None: stored as it comes."""
        return None

    # --- what is known before tracing ---------------------------------------------------------------------------

    def totals(self, *, layers: int, most: int) -> Int[np.ndarray, " counts"]:
        """Entries that all layers together keep of n tokens in scope, for n = 0..most."""
        return budgets.totals(self.keep, self.budget, layers=layers, most=most)

    def total(self, counts: Int[Array, " L"], seen: Int[Array, ""], *, layers: int, most: int) -> Int[Array, ""]:
        """Entries per head that all layers together keep.

        Args:
            counts: tokens in scope that each layer holds.
            seen: tokens in scope that the prompt had.
            layers: L.
            most: a bound on all of these.
        """
        del seen
        if self.reducer is None:
            return jnp.asarray(self.totals(layers=layers, most=most))[counts[0]]
        table = budgets.totals_of_sums(self.keep, self.budget, layers=layers, most=layers * most)
        return jnp.asarray(table)[jnp.sum(counts)]

    def vision_bounds(self, *, layers: int, vision: int, images: int) -> tuple[int, ...]:
        """The most vision tokens that each layer's cache may hold before anything is chosen."""
        after, left = self.reductions(layers), [vision]
        for stage in range(len(after)):
            left.append(min(left[-1], self.remaining(stage=stage, vision=left[-1], images=images)))
        if self.forgets:
            return (left[-1],) * layers
        return tuple(left[sum(i >= a for a in after)] for i in range(layers))

    def bound(self, *, layers: int, vision: int, text: int, images: int = 1) -> int:
        """The most entries per head, summed over layers, that a row with at most these tokens and images may keep."""
        held = sum(self.vision_bounds(layers=layers, vision=vision, images=images))
        in_scope = held + (layers * text if self.scope == "all" else 0)
        kept = budgets.totals_of_sums(self.keep, self.budget, layers=layers, most=in_scope)[-1]
        return int(kept) + (layers * text if self.scope == "vision" else 0)

    def cap_counts(self, *, layers: int, most: int) -> Int[np.ndarray, " counts"]:
        """Entries in scope that one layer may have under the cap, for n = 0..most tokens in scope."""
        assert self.cap is not None
        mean = self.totals(layers=layers, most=most) / layers
        return np.minimum(np.arange(most + 1), np.ceil(self.cap * mean)).astype(np.int32)

    def layer_bound(self, *, layers: int, vision: int, text: int) -> int:
        """The most entries per head that one layer of such a row may keep."""
        if type(self).allocate is not Policy.allocate or self.reducer is not None:
            return vision + text
        count = vision if self.scope == "vision" else vision + text
        mean = -(-int(self.totals(layers=layers, most=count)[-1]) // layers)
        return mean + (text if self.scope == "vision" else 0)

    def check_model(self, layers: int) -> None:
        """Raises InputError if an option does not fit a model of so many layers."""
        after = self.reductions(layers)
        if any(not 0 <= a < layers for a in after) or sorted(set(after)) != list(after):
            given = f"{self.shortens_by}={getattr(self, self.shortens_by)!r}"
            raise InputError(
                f"{type(self).__name__}: {given} shortens the prompt after layers {after!r}, which must rise and lie "
                f"within the model's {layers} layers: give another {self.shortens_by}="
            )

    def options(self) -> dict[str, Any]:
        """Its options as a plain dict, for tables and JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


def require_policy(given: object) -> None:
    """Raises InputError unless this is a policy."""
    if isinstance(given, Policy):
        return
    if isinstance(given, _PolicyType):
        raise InputError(f"policy={given.__name__} is a class: make a policy of it, as in {given.__name__}(keep=0.1)")
    if isinstance(given, str):
        raise InputError(f"policy={given!r} is a name: make a policy of it, as in policies.make({given!r}, keep=0.1)")
    raise InputError(f"policy={given!r} is no policy: pass one of vlkv.policies, or one of a subclass of Policy")


def checked_scores(policy: Policy, obs: Observation) -> Float[Array, "K T"]:
    """`policy.score`; raises InputError if its shape is wrong."""
    scores, expected = policy.score(obs), obs.k.shape[:2]
    found = getattr(scores, "shape", None)
    if found != expected:
        raise InputError(f"{type(policy).__name__}: score returned {scores if found is None else f'shape {found}'}: "
                         f"return a number for each key head and token, [K, T] = {expected}")  # fmt: skip
    return scores


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Budget(NamedTuple):
    """The budget of a policy as arrays, so that policies that differ in `keep` alone share one compiled program."""

    keep: Float[Array | np.ndarray, ""]
    totals: Int[Array | np.ndarray, " counts"]  # what `Policy.totals` returns


def with_budget(made: P, budget: Budget) -> P:
    """A copy of a policy, and of its parts, with this budget: for tracing only, its options are not static values."""
    copied = copy.copy(made)
    object.__setattr__(copied, "keep", budget.keep)
    object.__setattr__(copied, "totals", lambda **_: budget.totals)
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        part = getattr(made, field.name)
        if isinstance(part, Policy):
            object.__setattr__(copied, field.name, with_budget(part, budget))
    return copied
