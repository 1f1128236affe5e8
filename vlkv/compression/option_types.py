"""Types of options, and the check of a policy's options against their annotations."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np


class Range(NamedTuple):
    """Bounds on a number. `above` and `below`: `low` or `high` itself is excluded; `high`: None: any finite number."""

    low: float
    high: float | None = None
    above: bool = False
    below: bool = False
    odd: bool = False

    def __str__(self) -> str:
        if self.high is None:
            return f"of at least {self.low:g}" + ", odd" * self.odd
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}{')' if self.below else ']'}"

    def contains(self, value: float) -> bool:
        """Whether a number lies within the bounds."""
        low = value > self.low if self.above else value >= self.low
        high = self.high is None or (value < self.high if self.below else value <= self.high)
        return low and high and math.isfinite(value) and (not self.odd or value % 2 == 1)


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Odd = Annotated[int, Range(1, odd=True)]
Unit = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, above=True)]
Magnitude = Annotated[float, Range(0)]  # finite
Scope = Literal["vision", "all"]
Variant = Literal["paper", "released"]  # where published code differs from its paper
Pooling = Literal["avg", "max"]


def use_python_numbers(options: Any) -> None:
    """Replaces numpy's numbers in the fields of a frozen dataclass by Python's, also within tuples.

    So `keep=np.float32(0.2)` is equal to `keep=0.2`, has the same hash, and uses the same compiled program. Where only
    a float is meant, so is `keep=1` to `keep=1.0`.
    """
    cls: type = type(options)
    hints = _hints(cls)
    for field in dataclasses.fields(options):
        value = _python(getattr(options, field.name))
        if type(value) is int and _means_float(hints.get(field.name)):
            value = float(value)
        object.__setattr__(options, field.name, value)


def with_type(value: Any) -> Any:
    """A value to compare and to hash that tells a count from a share: 1 and 1.0 are equal in Python."""
    if type(value) is tuple:
        return tuple(map(with_type, value))
    return type(value), value


def _python(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_python, value)) if type(value) is tuple else value
    if isinstance(value, np.floating):
        return float(str(value))  # the shortest decimal: np.float32(0.2) is 0.2 and not 0.20000000298
    return value.item() if isinstance(value, np.generic) else value


def wrong_option(options: Any) -> tuple[str, str] | None:
    """The first field of a dataclass whose value does not fit its annotation, and what it must be; None if all fit."""
    cls: type = type(options)
    hints = _hints(cls)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in hints and not _fits(value, hints[field.name]):
            return field.name, _rule(value, hints[field.name])
    return None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):  # a user's annotation that has no meaning outside of a function
        return _hints(cls.__bases__[0])


def _means_float(hint: Any) -> bool:
    """Whether the only numbers that an annotation accepts are floats; then a whole number means the same."""
    kinds = [get_args(member)[0] if get_origin(member) is Annotated else member for member in _members(hint)]
    return float in kinds and int not in kinds


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _ranges(hint: Any) -> list[Range]:
    return [x for x in get_args(hint) if isinstance(x, Range)]


def _fits(value: Any, hint: Any) -> bool:
    if len(_members(hint)) > 1:
        return any(_fits(value, member) for member in _members(hint))
    origin = get_origin(hint)
    if origin is Annotated:
        return _fits(value, get_args(hint)[0]) and all(bounds.contains(value) for bounds in _ranges(hint))
    if origin is Literal:
        return any(type(value) is type(x) and value == x for x in get_args(hint))
    if origin is tuple:
        kinds = get_args(hint)
        if kinds[-1] is Ellipsis and isinstance(value, tuple):
            kinds = kinds[:1] * len(value)
        return isinstance(value, tuple) and len(kinds) == len(value) and all(map(_fits, value, kinds))
    if hint in (int, float):  # in Python, True is an int
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return not isinstance(hint, type) or hint is Any or isinstance(value, hint)


def _rule(value: Any, hint: Any) -> str:
    """What the option must be; for a number outside its interval only the interval."""
    bounds = [bounds for member in _members(hint) for bounds in _ranges(member)]
    if len(bounds) == 1 and bounds[0].high is not None and _fits(value, float):
        return f"must lie {bounds[0]}"
    names = [name for member in _members(hint) for name in _names(member)]
    return "must be " + (" or ".join([", ".join(names[:-1]), names[-1]]) if names[1:] else names[0])


def _names(hint: Any) -> list[str]:
    origin = get_origin(hint)
    if origin is Annotated:
        return [" ".join(map(str, [*_names(get_args(hint)[0]), *_ranges(hint)]))]
    if origin is Literal:
        return [f'"{x}"' if isinstance(x, str) else str(x) for x in get_args(hint)]
    if origin is tuple:
        return [f"a tuple of {_names(get_args(hint)[0])[0].removeprefix('a ').replace('number', 'numbers')}"]
    known = {int: "a whole number", float: "a number", bool: "True or False", types.NoneType: "None"}
    return [known.get(hint) or f"a {getattr(hint, '__name__', hint)}"]
