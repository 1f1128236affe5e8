"""Chat templates: find the checkpoint's own, and render it in a sandbox as transformers does.

A template is a program from whoever made the checkpoint. The sandbox keeps it away from Python's internals,
it sees nothing but plain strings, lists and dictionaries, and what it writes is bounded.
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

_LONGEST = 2**22  # characters of a prompt, far more than any model takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A compiled template and the file it came from."""

    source: str
    compiled: jinja2.Template

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The folder's template, or None where it has none.

        Where several files have one, the order is that of transformers' processors.

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
        """The prompt, up to and including what opens the model's answer.

        Args:
            messages: dictionaries with `role` and `content` (a string, or a list of image and text items).
            special: names of special tokens, seen by the template as variables.

        Raises:
            InputError: the template fails or refuses these messages.
        """
        try:
            pieces, length = [], 0
            for piece in self.compiled.generate(messages=messages, add_generation_prompt=True, **special):
                pieces.append(piece)
                length += len(piece)
                _require_short(length)
            return "".join(pieces)
        except Exception as error:  # whatever a foreign program may raise
            reason = one_line(error)
            raise InputError(f"{self.source}: the chat template refuses the prompt ({reason})") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the answers for training; when a prompt is written it has no effect."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it a set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which here also refuses operators, filters and methods that would fill the memory."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters.update({name: _bounded(filter) for name, filter in self.filters.items()})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """The operator; for text and lists only if the result is short, for numbers only if it has few digits."""
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
        """The function or method, unless it is given a number as large as no width or count has to be."""
        _require_small(*args, *options.values())
        return super().call(__context, __obj, *args, **options)


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with the same check."""

    @functools.wraps(filter)  # keeps what it says about the arguments that jinja2 adds
    def run(*args: Any, **options: Any) -> Any:
        _require_small(*args[1:], *options.values())  # the first may be any number, to be printed
        return filter(*args, **options)

    return run


def _require_small(*values: object) -> None:
    for value in values:
        if isinstance(value, int):
            _require_short(value)


def _require_short(length: int) -> None:
    if length > _LONGEST:
        raise jinja2.sandbox.SecurityError(f"it would make more than {_LONGEST} characters")


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _default(found: object) -> str | None:
    """One of several named templates, as a dictionary or as transformers 4's list: the one named default."""
    if isinstance(found, list):
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None
