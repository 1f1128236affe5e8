"""Finds the chat template of a checkpoint and renders it in a sandbox, as transformers does.

A template is a program that we do not trust. In the sandbox it cannot access Python's internals, it gets only strings,
lists and dictionaries, and the length of its output is limited.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from vlkv.errors import InputError
from vlkv.files import one_line, read_json, read_text

_LONGEST = 2**22  # limit on the characters of a prompt, more than any model can process


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A compiled template and the file it came from."""

    source: str
    compiled: jinja2.Template

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The folder's template; None if there is none. If several files have one, the order is that of transformers.

        Raises:
            InputError: a file is damaged, or the template is not valid Jinja.
        """
        for name in ("processor_config.json", "chat_template.json"):
            text = _default((read_json(folder / name) or {}).get("chat_template"))
            if text is not None:
                return cls.from_text(text, str(folder / name))
        text = read_text(folder / "chat_template.jinja")
        if text is not None:
            return cls.from_text(text, str(folder / "chat_template.jinja"))
        path = folder / "tokenizer_config.json"
        text = _default((read_json(path) or {}).get("chat_template"))
        return None if text is None else cls.from_text(text, str(path))

    @classmethod
    def from_text(cls, text: str, source: str) -> ChatTemplate:
        """Compiles a template; `source` names it in messages.

        Raises:
            InputError: the template is not valid Jinja.
        """
        try:
            return cls(source=source, compiled=_environment().from_string(text))
        except jinja2.TemplateError as error:
            raise InputError(f"{source}: the chat template is not valid ({one_line(error)})") from None

    def render(self, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str]) -> str:
        """The prompt, including the text that opens the model's answer.

        Args:
            messages: dictionaries with `role` and `content` (a string, or a list of image and text items).
            special: special tokens, which are variables of the template.

        Raises:
            InputError: the template raises an error.
        """
        try:
            pieces, length = [], 0
            for piece in self.compiled.generate(messages=messages, add_generation_prompt=True, **special):
                pieces.append(piece)
                length += len(piece)
                _require_short(length)
            return "".join(pieces)
        except Exception as error:  # a template can raise any error
            raise InputError(f"{self.source}: the chat template refuses the prompt ({one_line(error)})") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks answers for training and has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it a set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which also refuses operators, filters and methods with very large results."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters.update({name: _bounded(filter) for name, filter in self.filters.items()})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator unless the resulting text, list or number would be too long."""
        a, b = (len(x) if isinstance(x, Sized) else x for x in (left, right))
        if operator == "%":
            if isinstance(left, str) and re.search(r"\*|\d{7}", left):
                raise jinja2.sandbox.SecurityError(f"a width in {left!r} is too large")
        elif isinstance(a, int) and isinstance(b, int):
            if isinstance(left, Sized) or isinstance(right, Sized):
                _require_short(a * b if operator == "*" else a + b)
            elif operator != "+":
                _require_short(a.bit_length() * (b if operator == "**" else b.bit_length()))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **options: Any) -> Any:
        """Calls a function or method unless an argument is a very large number, such as the width of a text."""
        _require_small(*args, *options.values())
        return super().call(__context, __obj, *args, **options)


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with the check of `_Sandbox.call`."""

    @functools.wraps(filter)  # keeps jinja2's mark on filters that get further arguments
    def run(*args: Any, **options: Any) -> Any:
        _require_small(*args[1:], *options.values())  # the first is the value to print, and may be any number
        return filter(*args, **options)

    return run


def _require_small(*values: object) -> None:
    for value in values:
        if isinstance(value, int):
            _require_short(value)


def _require_short(length: int) -> None:
    if length > _LONGEST:
        raise jinja2.sandbox.SecurityError(f"the result would have more than {_LONGEST} characters")


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _default(found: object) -> str | None:
    """The template, or, of several named ones (a dictionary, or a list in transformers 4), the one named "default"."""
    if isinstance(found, list):
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None
