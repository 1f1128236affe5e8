"""The base classes of policies: frozen dataclasses without leaves, with stages that methods override.

Every method is a `Policy`, which scores the tokens of each layer during prefill and then selects those that are kept.
`ReducingStages` adds the stages of methods that reduce the prompt during prefill, and `DecodingStages` those of methods
that update the cache while decoding. Stages are unbatched; the caller applies vmap over B. A method overrides the
stages that it needs. A user's subclass works like the methods of this package.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.cache.decode_state import DecodeState
from vlkv.cache.pool import Storage
from vlkv.compression import budgets
from vlkv.compression.facts import Facts, Statistics
from vlkv.compression.observe import Observation
from vlkv.compression.option_types import Positive, Range, Scope, Share, use_python_numbers, with_type, wrong_option
from vlkv.compression.tokens import Tokens
from vlkv.errors import InputError

EITHER = "give either keep= (a fraction) or budget= (tokens per layer)"


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _PolicyType(type):
    """Makes every policy class a frozen, keyword-only dataclass that is static under jit, and completes its facts."""

    facts: Facts

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)
        own, default = body.get("facts", Facts()), Facts._field_defaults
        inherited = next((base.facts for base in bases if isinstance(base, _PolicyType)), Facts())
        facts = inherited._replace(**{k: v for k, v in own._asdict().items() if v != default[k]})
        overridden = [stage for stage in ("allocate", "rank", "merge") if stage in body and stage not in facts.stages]
        if bases:  # the base class itself changes nothing
            facts = facts._replace(stages=", ".join([facts.stages, *overridden]))
            if "allocate" in body and facts.budgets == "equal":
                facts = facts._replace(budgets="layers")
        cls.facts = facts
        made: Any = cls
        # `Policy` compares options with their types, so that jit does not take a share for an equal count.
        jax.tree_util.register_static(dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(made))


jax.tree_util.register_static(_PolicyType)  # a class that is passed instead of a policy gets our own error


class Policy(metaclass=_PolicyType):
    """Base class: keeps the tokens in scope with the highest `score`, the same number in every layer.

    Attributes:
        keep: fraction of the tokens in scope that is kept, in (0, 1].
        budget: instead of `keep`, the mean number of tokens in scope that is kept per layer and head.
        scope: "vision": the budget is for vision tokens, and all text is kept; "all": the budget is for all tokens.
        cap: for methods with different budgets per layer: limit on a layer's budget, as a multiple (at least 1) of the
            mean budget. During prefill a layer stores only this number of entries until budgets are known, so the
            uncompressed cache of all layers never exists. Budget above the cap goes to other layers.
        facts: what is known of the method before it runs.
    """

    keep: Share | None = None
    budget: Positive | None = None
    scope: Scope = "all"
    cap: Annotated[float, Range(1)] | None = None

    facts: ClassVar[Facts]
    softmax_n: ClassVar[float] = 0.0  # the n of n-softmax in decode attention (CSP, Eq. 7); 0: softmax
    storage: ClassVar[Storage | None] = None  # quantisation of the pool; None: not quantised

    def __post_init__(self) -> None:
        check_types(self)
        if (self.keep is None) == (self.budget is None):
            raise InputError(f"{type(self).__name__}: {EITHER}")
        capped = self.cap is None or self.facts.capped
        self.check("cap", capped, "needs facts = Facts(capped=True), for budgets per layer and tokens ranked by scores")
        self.check("cap", self.cap is None or not self.merges, "cannot be combined with merging")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and _options(self) == _options(other)

    def __hash__(self) -> int:
        return hash((type(self), _options(self)))

    def check(self, field: str, ok: bool, rule: str) -> None:
        """Raises InputError with the option and the rule unless `ok`."""
        if not ok:
            raise InputError(f"{type(self).__name__}: {field}={getattr(self, field)!r} {rule}")

    def check_model(self, layers: int) -> None:
        """Raises InputError if an option does not fit a model with `layers` layers."""

    # --- stages of a selection ----------------------------------------------------------------------------------

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """The importance of each token for each key head; higher is better. Values out of scope are ignored.

        `obs` has the layer's queries q [N, T, H], keys and values k and v [K, T, H], and masks over tokens: `valid` (no
        padding), `is_vision`, `in_scope` (compete for the budget), `instruction` (text after the last image). Functions
        of observe.py, such as `rows_mass`, measure attention.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method score(self, obs)")

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """Tokens that are kept whatever their score, within the budget; if they exceed it, the last of them are kept.

        Used only with scope="all". With "vision" there are no protected tokens, because sinks and recent tokens are
        usually text, which is kept anyway.
        """
        return jnp.zeros_like(obs.valid)

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """Arrays of this layer that `allocate`, `rank` or `vlkv.analysis` need, by names of your own.

        `allocate` gets them of all layers, stacked along a new first axis L; `rank` gets those of one layer.
        """
        return {}

    def allocate(
        self, statistics: Statistics, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, " L"] | Int[Array, "L K"]:
        """The budget of each layer: the number of tokens in scope that each of its key heads keeps.

        Budgets are whole numbers from 0 to `most`, with a sum of at most `total`; `budgets.apportion` rounds fractions
        to such numbers. With scope="vision", text is kept besides. With `Facts.budgets` "heads", budgets are per layer
        and head, and the sum over all K heads is at most K `total`. `select` raises InputError for budgets outside
        these bounds. Under jit, as in `generate`, they are clipped instead, in the upper layers if their sum is too
        large.

        Args:
            statistics: of all layers, with a leading axis L.
            total: what `keep` or `budget` allows all layers together.
            most: number of tokens in scope of each layer that may still be kept: with a cap, those of the shortlist.
            layers: L.
        """
        return budgets.uniform(total, most)

    def total(self, sums: Int[np.ndarray, " sums"], *, layers: int, text: int) -> Int[np.ndarray, " sums"]:
        """Number of entries per head that all layers together keep at most. The size of the cache follows from it.

        Args:
            sums: `sums[i]` is the number of tokens in scope of prompt i, added over all layers.
            layers: L.
            text: bound on the text tokens of a prompt.
        """
        return budgets.total(self.keep, self.budget, sums, layers=layers)

    def rank(
        self,
        scores: Float[Array, "K T"],
        statistics: Statistics,
        candidates: Bool[Array, " T"],
        count: Int[Array, " K"],
    ) -> tuple[Float[Array, "K T"], Int[Array, " K"]]:
        """Final ranking of one layer's tokens. Override it if the ranking depends on the layer's budget.

        Args:
            scores: result of `score`.
            statistics: of this layer.
            candidates: tokens in scope that are not protected.
            count: number of candidates to keep, per head.

        Returns:
            The values to rank the candidates by, and the number to keep: `count` or less.
        """
        return scores, count

    def merge(
        self,
        k: Float[Array, "K T H"],
        v: Float[Array, "K T H"],
        kept: Bool[Array, "K T"],
        scores: Float[Array, "K T"],
    ) -> tuple[Float[Array, "K T H"], Float[Array, "K T H"]]:
        """Keys and values of all tokens. Only the kept ones are cached; a method may merge dropped ones into them."""
        return k, v

    # --- what options decide, and owners of stages: another policy if this one is a composition -------------------

    @property
    def merges(self) -> bool:
        """Whether dropped entries are merged into kept ones, also if another policy selects them."""
        return "merge" in self.facts.stages

    @property
    def follows_paper(self) -> bool:
        """False for formulas of published code, which hold for whole prompts only and may need their own `keep`."""
        return True

    @property
    def reducer(self) -> ReducingStages | None:
        """The policy that reduces the prompt during prefill; None: no policy does."""
        return None

    @property
    def updater(self) -> DecodingStages | None:
        """The policy that updates the cache while decoding; None: no policy does."""
        return None


class ReducingStages(Policy):
    """Base class of methods that reduce the prompt between layers during prefill."""

    drops_early_layers: ClassVar[bool] = False  # whether dropped tokens are removed from earlier layers' caches too
    class_attention_layers: ClassVar[tuple[int, ...]] = ()  # tower blocks whose attention `reduce` needs

    @property
    def reducer(self) -> ReducingStages | None:
        """The policy itself. Override it if the prompt is reduced only with some options."""
        return self

    def check_model(self, layers: int) -> None:
        """Raises InputError if the prompt would be reduced after layers that the model does not have."""
        after = () if self.reducer is None else self.reductions(layers)
        if any(not 0 <= a < layers for a in after) or sorted(set(after)) != list(after):
            common = {field.name for field in dataclasses.fields(Policy)}
            own = [field.name for field in dataclasses.fields(self) if field.name not in common]
            raise InputError(
                f"{type(self).__name__} reduces the prompt after layers {after!r}, which must be increasing and less "
                f"than the model's {layers} layers: change {', '.join(own)}"
            )

    def reductions(self, layers: int) -> tuple[int, ...]:
        """For each call of `reduce`, how many layers run before it, in increasing order; 0: before the first layer."""
        raise NotImplementedError

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
        """The tokens with new hidden states, and which of them are kept. Dropped tokens may be merged into kept ones.

        Args:
            tokens: after the layer, or before the first.
            obs: observation of the layer; None before the first.
            stage: index into `reductions`.
        """
        raise NotImplementedError

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """Bound on the vision tokens after a stage, for at most `vision` vision tokens of `images` images before it.

        `read_prompt` raises InputError if `reduce` keeps more. Under jit the last vision tokens are dropped instead.
        """
        return vision


class DecodingStages(Policy):
    """Base class of methods with a decode state (`DecodeState`), which `step` updates for every new token."""

    @property
    def updater(self) -> DecodingStages | None:
        """The policy itself. Override it if the cache is updated only with some options."""
        return self

    def decode_values(self, obs: Observation, scores: Float[Array, "K T"]) -> dict[str, Float[Array, "K T"]]:
        """Numbers per prompt token that `begin` and `step` need; the decode state stores those of kept tokens.

        `scores` are those of this policy, even if another one selects the tokens.
        """
        return {}

    def begin(self, state: DecodeState) -> DecodeState:
        """Called once after prefill and before packing. Entries that it evicts take no slot.

        With `budget=`, a layer that has kept a short prompt as a whole may grow up to the budget.
        """
        if self.budget is None or self.scope == "vision":
            return state
        whole = state.budget >= state.counted
        return dataclasses.replace(state, budget=jnp.where(whole, jnp.maximum(state.budget, self.budget), state.budget))

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        """Called after the attention of each step; `mass` is the share of attention that every entry received."""
        raise NotImplementedError

    def decode_slots(self, state: DecodeState) -> Int[Array, " K"]:
        """Slots of a segment if entries are evicted: the greatest number of entries at one time, with the new one.

        `state` is the result of `begin`; at most `state.new_tokens` tokens follow. If a segment is full and `step`
        evicts nothing, the oldest entry is evicted.
        """
        return jnp.minimum(state.budget, state.vision + state.text + state.new_tokens) + 1

    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int] | None:
        """Bounds on `decode_slots`, for all layers together and for one layer. None: `step` evicts nothing.

        If it evicts, new entries take free slots instead of a tail, unless the pool is quantised.

        Args:
            kept: bound on the entries of all layers after prefill.
            longest: bound on the entries of one layer.
            layers: L.
            vision: bound on the vision tokens of a prompt.
            text: bound on its text tokens.
            new_tokens: bound on the tokens that follow.
        """
        grown = 0 if self.budget is None else min(self.budget, vision + text + new_tokens)
        return max(kept, layers * grown) + layers, max(longest, grown) + 1


def _options(policy: Any) -> Any:
    """The options of a policy, to compare and to hash."""
    return with_type(tuple(getattr(policy, field.name) for field in dataclasses.fields(policy)))


def check_types(policy: Policy) -> None:
    """Raises InputError unless every option fits its annotation. Numbers of numpy become Python's."""
    use_python_numbers(policy)
    if (wrong := wrong_option(policy)) is not None:
        policy.check(wrong[0], False, wrong[1])
