"""The text of a policy, the same in Python, on the command line and in result files:

    snapkv
    aircache(keep=0.1, window="text")
    compose(aircache(keep=0.1, window="text"), smooth=smooth(8, one_sided=True, pooling="max"), store=kivi(bits=4))

It looks like a call in Python. Names are those of the registry, in upper or lower case, and FILE.py:CLASS or
MODULE:CLASS for your own class; NAME=FILE.py:CLASS gives it another name in tables and plots.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vlkv.compression.compose import SHARED, compose
from vlkv.compression.option_types import with_type
from vlkv.compression.policy import Policy
from vlkv.compression.slots import NUMBERS, STAGES, Composed, slots_of
from vlkv.compression.smooth import Smooth
from vlkv.compression.stages import stage_of
from vlkv.errors import InputError
from vlkv.policies import own

Find = Callable[[str], type[Policy]]
Convert = Callable[[type[Policy], dict[str, Any]], dict[str, Any]]
_PART = rf"(?:{'|'.join((*STAGES, 'smooth', *NUMBERS))})\s*=\s*"  # the name of a part of a composition
# FILE.py:CLASS where a policy may stand; the path may have any characters, except a comma and such a name.
_FILE = re.compile(
    rf"(^(?!\s*compose\()\s*|\bcompose\(\s*|,\s*{_PART})((?:(?!,\s*{_PART}).)+?\.py:[A-Za-z_]\w*)(?=\s*(?:[,()]|$))",
    re.I,
)
# MODULE:CLASS; at the beginning of the text perhaps with NAME= in front.
_MODULE = re.compile(r"()((?:^\s*[A-Za-z_][\w -]*=|(?<![\w'\"]))[\w./~-]+:[A-Za-z_]\w*)")
_BUDGET = ("keep", "budget")
_EXPECTED = "expected a name, NAME(OPTION=VALUE, ...) or compose(...)"


def parse(text: str, find: Find, given: Mapping[str, Any], convert: Convert | None = None) -> Policy:
    """The policy of a text.

    Args:
        text: as described above.
        find: returns the class of a name.
        given: options for the policy, or for the scores of a composition, where the text does not contain them. `keep`
            and `budget` are used if the text contains neither; in a composition, also by other parts that need one.
        convert: changes the options of every policy before it is constructed.

    Raises:
        InputError: the text is no such call, a name or an option is unknown, or an option has a wrong value.
    """
    names: list[str] = []

    def placeholder(match: re.Match[str]) -> str:
        names.append(match[2])
        return f"{match[1]}own_{len(names) - 1}"

    try:
        tree = ast.parse(_MODULE.sub(placeholder, _FILE.sub(placeholder, text)).strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise InputError(f"policy {text!r}: {_remedy(text)}") from None
    return _Reader(text, names, find, convert).policy(tree, given)


def _remedy(text: str) -> str:
    """How to write a text that is no policy."""
    if text.strip().endswith(".py"):
        return "a file needs the name of its class, as in FILE.py:CLASS"
    if text.count("(") != text.count(")"):
        return f"its brackets do not match; {_EXPECTED}"
    return _EXPECTED


class _Reader(NamedTuple):
    """Constructs policies from the syntax tree of a text."""

    text: str
    names: list[str]  # names of the user's own classes; the tree contains own_0, own_1 ... in their place
    find: Find
    convert: Convert | None

    def policy(self, node: ast.expr, given: Mapping[str, Any]) -> Policy:
        """The policy of a name or a call; `given` as in `parse`."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.lower() == "compose":
            return self.composed(node, given)
        name = self.name(node)
        cls, (args, options) = self.find(name), self.values(node)
        if args:
            raise InputError(f"{name}: give options by name, as in {name}(keep=0.1)")
        unset = [option for option in (*_BUDGET, "scope") if given.get(option) is None]
        rest = {option: value for option, value in given.items() if option not in unset}
        if any(options.get(option) is not None for option in _BUDGET):
            rest = {option: value for option, value in rest.items() if option not in _BUDGET}
        if getattr(cls, "own_keep", False):
            rest = {option: value for option, value in rest.items() if option not in (*_BUDGET, "scope")}
        options = {**rest, **options}
        return construct(cls, options if self.convert is None else self.convert(cls, options))

    def composed(self, node: ast.Call, given: Mapping[str, Any]) -> Policy:
        """The composition of a call of `compose`."""
        if len(node.args) != 1 or any(word.arg not in (*STAGES, "smooth", *NUMBERS) for word in node.keywords):
            numbers = f"{'=, '.join(NUMBERS[:-1])}= and {NUMBERS[-1]}="
            raise InputError(f"policy {self.text!r}: expected compose(POLICY, STAGE=POLICY, ...) with stages among "
                             f"{', '.join(STAGES)}, smooth=, {numbers}")  # fmt: skip
        scores = self.policy(node.args[0], given)
        common = {name: getattr(scores, name) for name in (*_BUDGET, "scope") if getattr(scores, name) is not None}
        parts: dict[str, Any] = {}
        for word in node.keywords:
            stage, part = str(word.arg), word.value
            if stage == "smooth":
                parts[stage] = self.smooth(part)
            elif stage in NUMBERS:
                parts[stage] = self.literal(part)
            else:
                shared = stage in SHARED or (stage == "store" and self.divides_bits(part))
                parts[stage] = self.policy(part, common) if shared else self.self_sufficient(part, given)
        return compose(scores, **parts)

    def divides_bits(self, node: ast.expr) -> bool:
        """Whether a method divides the bits of the budget, which it then shares with the scores."""
        name = self.name(node)
        return name.lower() != "compose" and self.find(name).facts.budgets == "bits"

    def self_sufficient(self, node: ast.expr, given: Mapping[str, Any]) -> Policy:
        """A part with a keep of its own: that of the text, that of its class, or else the given one."""
        try:
            return self.policy(node, {})
        except InputError:
            budget = {name: given[name] for name in _BUDGET if given.get(name) is not None}
            if not budget:
                raise
            return self.policy(node, budget)

    def smooth(self, node: ast.expr) -> Smooth:
        """The smoothing of a call of `smooth`."""
        args, options = self.values(node)
        try:
            if self.name(node).lower() != "smooth":
                raise TypeError
            return Smooth(*args, **options)
        except TypeError:
            raise InputError(f"policy {self.text!r}: expected smooth=smooth(KERNEL, pooling=...)") from None

    def literal(self, node: ast.expr) -> Any:
        """The value of a literal."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, MemoryError, RecursionError):
            raise InputError(f"policy {self.text!r}: options must be literals, with texts in quotes") from None

    def name(self, node: ast.expr) -> str:
        """The name that a node is or calls."""
        node = node.func if isinstance(node, ast.Call) else node
        if not isinstance(node, ast.Name):
            raise InputError(f"policy {self.text!r}: {_remedy(self.text)}")
        return self.names[int(node.id[4:])] if re.fullmatch(r"own_\d+", node.id) else node.id

    def values(self, node: ast.expr) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call; none if the node is a name."""
        if not isinstance(node, ast.Call):
            return [], {}
        words = {str(word.arg): self.literal(word.value) for word in node.keywords}
        if len(words) < len(node.keywords) or "None" in words:  # an option twice, or **options
            raise InputError(f"policy {self.text!r}: options must be literals, with texts in quotes")
        return [self.literal(value) for value in node.args], words


def short(text: str) -> str:
    """The text of a policy for tables: one's own class is its NAME, or else CLASS, without file or module."""

    def name(match: re.Match[str]) -> str:
        return match[1] + own.split_name(match[2])[0]

    return _MODULE.sub(name, _FILE.sub(name, text))


def construct(cls: type[Policy], options: Mapping[str, Any]) -> Policy:
    """An instance; InputError names what is wrong with the options."""
    with own.errors(cls):
        return cls(**options)


def text_of(policy: Policy, find: Find, *, scope: bool = False) -> str:
    """The text of a policy, with the options that differ from their defaults. `parse` makes the same policy of it.

    With `scope`, it has the scope of a `keep` or `budget` even if it is the method's default.
    """
    slots = slots_of(policy)
    scored, own_slots = slots.score, slots_of(slots.score)
    shown = ("scope",) if scope and (own_slots.reduce is not None or not stage_of(scored, "own_keep")) else ()
    if not isinstance(policy, Composed):
        return _call(policy, find, {}, shown)
    common = {name: getattr(policy, name) for name in (*_BUDGET, "scope")}
    parts = [_call(scored, find, {}, shown)]
    for stage in STAGES:
        part = getattr(slots, stage)
        divides = slots.divides_bits and part == slots.store  # also ranks and allocates
        if part != getattr(own_slots, stage) and (stage == "store" or not divides):
            parts.append(f"{stage}={_call(part, find, common if divides or stage in SHARED else {})}")
    if slots.smooth is not None:
        kernel, *rest = dataclasses.fields(slots.smooth)
        values = [repr(getattr(slots.smooth, kernel.name)), *_changed(slots.smooth, rest)]
        parts.append(f"smooth=smooth({', '.join(values)})")
    parts += [f"{name}={getattr(slots, name)}" for name in NUMBERS if getattr(slots, name) != getattr(own_slots, name)]
    return f"compose({', '.join(parts)})"


def _call(policy: Policy, find: Find, common: Mapping[str, Any], shown: tuple[str, ...] = ()) -> str:
    """The call of one policy, without the options that are in `common`, and with defaults of those in `shown`."""
    fields = [
        field for field in dataclasses.fields(policy)
        if field.name not in common or common[field.name] != getattr(policy, field.name)
    ]  # fmt: skip
    if stage_of(policy, "own_keep"):
        fields = [field for field in fields if field.name != "keep"]
    options = ", ".join(_changed(policy, fields, shown))
    return _name(type(policy), find) + (f"({options})" if options else "")


def _changed(made: Any, fields: list[Any], shown: tuple[str, ...] = ()) -> list[str]:
    pairs = ((field, getattr(made, field.name)) for field in fields)
    changed = ((field, value, with_type(value) != with_type(field.default)) for field, value in pairs)
    return [f"{field.name}={value!r}" for field, value, differs in changed if differs or field.name in shown]


def _name(cls: type[Policy], find: Find) -> str:
    """The name by which `find` finds the class; the class's own name if there is none."""
    own = f"{cls.__module__}:{cls.__name__}"
    renamed = f"{cls.__name__}={cls.__module__}:{cls.__base__.__name__}" if cls.__base__ is not None else own
    for candidate in (cls.__name__.lower(), own, renamed):
        try:
            if find(candidate) is cls:
                return candidate
        except InputError:
            continue
    return cls.__name__
