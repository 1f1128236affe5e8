"""The base classes of policies. A policy is a frozen dataclass whose class defines the stages that it changes.

Every method is a `Policy` with a `score`. `Stages` lists all other functions and attributes that a class may define,
and what happens if it does not define them. `ReducingStages` is the base of methods that reduce the prompt during
prefill, `DecodingStages` of methods that update the cache while decoding. Stages are unbatched; the caller applies vmap
over B. A user's class works like the methods of this package.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.cache.decode_state import DecodeState
from vlkv.compression.observe import Observation
from vlkv.compression.option_types import Positive, Range, Scope, Share, use_python_numbers, with_type, wrong_option
from vlkv.compression.stages import (  # noqa: F401  # methods import all of these from here
    Budgets,
    Entries,
    Kept,
    Mask,
    PerHead,
    PerLayer,
    Scores,
    Stages,
    Statistics,
    Totals,
    fills,
    stage_of,
    those,
)
from vlkv.compression.tokens import Tokens
from vlkv.errors import InputError, suggestion

EITHER = "give either keep= (a fraction) or budget= (tokens per layer)"


class Facts(NamedTuple):
    """What is known of a method before it runs. A class inherits every field that it leaves at its default value.

    Attributes:
        paper: first author, year and title, or "baseline".
        equations: where the paper defines the method.
        source: where the paper and the published code are.
        stages: the stages that the method changes, separated by commas, for tables. `allocate`, `rank`, `merge`, `step`
            and `reduce` are added if the class defines them.
        budgets: which budgets may differ: "equal": none; "layers": those of the layers; "heads": those of the layers
            and heads; "bits": `keep` is a share of the bits, from which the numbers of entries follow. If a class
            defines `allocate`, its default is "layers".
        capped: whether `cap` is supported. With a cap a layer stores only a shortlist, which scores alone choose. So
            `allocate` must grant at most `most`, and `rank` must order tokens by their scores.
        selects: whether entries are evicted after prefill.
        observes: whether `score` depends on queries. If not, observing tokens of the answer would change nothing.
    """

    paper: str = ""
    equations: str = ""
    source: str = ""
    stages: str = "score"
    budgets: Literal["equal", "layers", "heads", "bits"] = "equal"
    capped: bool = False
    selects: bool = True
    observes: bool = True


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _PolicyClass(abc.ABCMeta):
    """The type of policy classes: raises our own one-line errors for wrong options.

    The type is registered as static, so that a class that is passed by mistake in place of a policy gets through jit to
    `require_policy`, whose error names the remedy.
    """

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **options: Any) -> Any:
            """Makes a policy. Raises InputError for options that are positional, unknown or missing."""
            if args:
                raise InputError(f"{cls.__name__}: give options by name, as in {cls.__name__}(keep=0.1)")
            known = {field.name: field for field in dataclasses.fields(cls)}
            for option in (name for name in options if name not in known):
                hint = suggestion(option, known, f"it has {', '.join(known)}")
                raise InputError(f"{cls.__name__} has no option {option!r}: {hint}")
            for option in (name for name in known if name not in options):
                if known[option].default is known[option].default_factory is dataclasses.MISSING:
                    raise InputError(f"{cls.__name__} needs the option {option}=")
            return super().__call__(**options)


jax.tree_util.register_static(_PolicyClass)
# "reduce" and "step": the base class with the other functions that the driver calls on a method that defines them.
_BASES: dict[str, type[Policy]] = {}
# Names of former releases, and what replaces them. Without an error, a class that still defines them would be ignored.
_RENAMED = {"reducer": "idle", "updater": "idle", "merges": "idle", "follows_paper": "needs"}


def _frozen(cls: Any) -> None:
    # eq=False, because `Policy` itself compares options with their types: else jit would take a share for a count.
    jax.tree_util.register_static(dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls))


class Policy(metaclass=_PolicyClass):
    """Base class: keeps the tokens in scope with the highest `score`, the same number in every layer.

    Every subclass becomes a frozen dataclass with keyword-only options, static under jit. `Stages` lists what else it
    may define.

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

    facts: ClassVar[Facts] = Facts()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # The base's facts, then the fields that this class sets, then the stages that it defines.
        body, declared, default = vars(cls), vars(cls).get("facts", Facts()), Facts._field_defaults
        facts = super(cls, cls).facts._replace(**{k: v for k, v in declared._asdict().items() if v != default[k]})
        overridden = [
            name
            for name in ("allocate", "rank", "merge", "step", "reduce")
            if name in body and name not in facts.stages
        ]
        facts = facts._replace(stages=", ".join([facts.stages, *overridden]))
        if "allocate" in body and facts.budgets == "equal":
            facts = facts._replace(budgets="layers")
        cls.facts = facts
        # A class that defines `reduce` or `step` need not derive from their base: it gets the functions that it lacks.
        for stage, base in _BASES.items():
            if stage in body and not issubclass(cls, base):
                for name in vars(base).keys() - dir(cls):
                    setattr(cls, name, vars(base)[name])
                base.register(cls)
        for name, instead in _RENAMED.items():
            if name in body:
                raise InputError(f"{cls.__name__}: {name} is not used any more: define {instead}, see Stages")
        _frozen(cls)
        # `stage_of` would take the value of such an option for the stage.
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.name in vars(Stages) and not field.name.startswith("_"):
                raise InputError(f"{cls.__name__}: an option cannot be called {field.name!r}, the name of a stage")

    def __post_init__(self) -> None:
        check_types(self)
        if (self.keep is None) == (self.budget is None):
            raise InputError(f"{type(self).__name__}: {EITHER}")
        if self.cap is not None:
            rule = "needs facts = Facts(capped=True), for budgets per layer and tokens ranked by scores"
            self.check("cap", self.facts.capped, rule)
            self.check("cap", not fills(self, "merge"), "cannot be combined with merging")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and _options(self) == _options(other)

    def __hash__(self) -> int:
        return hash((type(self), _options(self)))

    def check(self, field: str, ok: bool, rule: str) -> None:
        """Raises InputError with the option and the rule unless `ok`."""
        if not ok:
            raise InputError(f"{type(self).__name__}: {field}={getattr(self, field)!r} {rule}")

    def score(self, obs: Observation) -> Scores:
        """The importance of each token for each key head; higher is better. Values out of scope are ignored.

        `obs` has the layer's queries q [N, T, H], keys and values k and v [K, T, H], and masks over tokens: `valid` (no
        padding), `is_vision`, `in_scope` (compete for the budget), `instruction` (text after the last image).
        `obs.mean_budget` is a layer's mean budget. Functions of observe.py, such as `rows_mass`, measure attention.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method score(self, obs)")

    def protect(self, obs: Observation) -> Mask:
        """Tokens that are kept whatever their score, within the budget; if they exceed it, the last of them are kept.

        Used only with scope="all". With "vision" there are no protected tokens, because sinks and recent tokens are
        usually text, which is kept anyway.
        """
        return jnp.zeros_like(obs.valid)


_frozen(Policy)


class ReducingStages(Policy):
    """Base class of methods that reduce the prompt between layers during prefill."""

    def check_model(self, layers: int) -> None:
        """Raises InputError if the prompt would be reduced after layers that the model does not have."""
        after = self.reductions(layers) if fills(self, "reduce") else ()  # options may switch the reduction off
        if any(not 0 <= a < layers for a in after) or sorted(set(after)) != list(after):
            common = {field.name for field in dataclasses.fields(Policy)}
            options = [field.name for field in dataclasses.fields(self) if field.name not in common]
            raise InputError(
                f"{type(self).__name__} reduces the prompt after layers {after!r}, which must be increasing and less "
                f"than the model's {layers} layers: change {', '.join(options)}"
            )

    def reductions(self, layers: int) -> tuple[int, ...]:
        """For each call of `reduce`, how many layers run before it, in increasing order; 0: before the first layer.

        `layers`, and the results, count the layers with full attention.
        """
        raise NotImplementedError

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        """The tokens with new hidden states, and which of them are kept. Dropped tokens may be merged into kept ones.

        Args:
            tokens: after the layer, or before the first.
            obs: observation of the layer; None before the first.
            stage: index into `reductions`.
        """
        raise NotImplementedError

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """Bound on the vision tokens after a stage, for at most `vision` vision tokens of `images` images before it.

        The rows of later layers have capacity for this number. If `reduce` keeps more, `read_prompt` raises InputError;
        under jit, where values are not known, the last vision tokens are dropped instead.
        """
        return vision


class DecodingStages(Policy):
    """Base class of methods with a decode state (`DecodeState`), which `step` updates for every new token."""

    def decode_values(self, obs: Observation, scores: Scores) -> dict[str, Scores]:
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
        complete = state.budget >= state.counted  # nothing has been evicted
        return dataclasses.replace(
            state, budget=jnp.where(complete, jnp.maximum(state.budget, self.budget), state.budget)
        )

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        """The decode state after the attention of each step, usually by `evict(state, evictable(...), value)`.

        `mass` is the share of its attention that each query head has given to every entry.
        """
        raise NotImplementedError

    def decode_slots(self, state: DecodeState) -> PerHead:
        """Slots of a segment if entries are evicted: the greatest number of entries at one time, with the new one.

        `state` is the result of `begin`; at most `state.new_tokens` tokens follow. If a segment is full and `step`
        evicts nothing, the oldest entry is evicted.
        """
        return jnp.minimum(state.budget, state.vision + state.text + state.new_tokens) + 1

    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int] | None:
        """Static bounds on `decode_slots`, for all layers together and for one layer. None: `step` evicts nothing.

        With bounds, new entries take free slots instead of a tail, unless the pool is quantised.

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


_BASES |= {"reduce": ReducingStages, "step": DecodingStages}


def _options(policy: Any) -> Any:
    # With types, because 1 and 1.0 are equal in Python, but as `recent` one is a count and the other a share.
    return with_type(tuple(getattr(policy, field.name) for field in dataclasses.fields(policy)))


def check_types(policy: Policy) -> None:
    """Raises InputError unless every option fits its annotation. Numbers of numpy become Python's."""
    use_python_numbers(policy)
    if (wrong := wrong_option(policy)) is not None:
        field, rule = wrong
        if field == "keep" and isinstance(policy.keep, int | float) and policy.keep > 1:
            rule += ": it is a share, such as 0.2; a number of tokens is a budget"
        policy.check(field, False, rule)
