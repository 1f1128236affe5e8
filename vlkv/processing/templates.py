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
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from vlkv.errors import InputError
from vlkv.files import DATA, one_line, read_json, read_text

T = TypeVar("T")
_LONGEST = 2**22  # limit on the characters of a prompt, more than any model can process


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A compiled template, its text, and the file it came from."""

    source: str
    text: str
    compiled: jinja2.Template = dataclasses.field(repr=False, compare=False)
    of_videos: ChatTemplate | None = None  # replaces it for conversations with videos; None: it is the same

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate.from_text, (self.text, self.source, self.of_videos)  # compiled ones cannot be copied

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The folder's template; None if there is none. If several files have one, the order is that of transformers.

        Raises InputError for a damaged file, a template that is not valid Jinja, and several of which none is named
        "default".
        """
        for name in ("processor_config.json", "chat_template.json"):
            template = cls._from_json(folder / name)
            if template is not None:
                return template
        files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").exists():
            files["default"] = folder / "chat_template.jinja"
        if files:
            path = _default(files, str(folder))
            return cls.from_text(read_text(path) or "", str(path))
        return cls._from_json(folder / "tokenizer_config.json")

    @classmethod
    def _from_json(cls, path: Path) -> ChatTemplate | None:
        """The template in a file's field `chat_template`: a text, or a dictionary or list of named templates."""
        field = (read_json(path) or {}).get("chat_template")
        if field is None:
            return None
        if isinstance(field, list):  # as in transformers 4
            field = {item.get("name"): item.get("template") for item in field if isinstance(item, dict)}
        text = _default(field, str(path)) if isinstance(field, dict) else field
        if not isinstance(text, str):
            raise InputError(f"{path}: chat_template must be a text, or a list of named texts; copy it from the "
                             "checkpoint's source")  # fmt: skip
        return cls.from_text(text, str(path))

    @classmethod
    def from_text(cls, text: str, source: str, of_videos: ChatTemplate | None = None) -> ChatTemplate:
        """Compiles a template; `source` names it in messages. Raises InputError if it is not valid Jinja."""
        try:
            compiled = _environment().from_string(text)
            return cls(source=source, text=text, compiled=compiled, of_videos=of_videos)
        except jinja2.TemplateError as error:
            raise InputError(f"{source}: the chat template is not valid ({one_line(error)})") from None

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads."""
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(self.text)))

    @property
    def reads_reasoning(self) -> bool:
        """Whether it takes the reasoning of an answer apart from its text, as transformers passes it."""
        return "reasoning_content" in self.text

    def render(self, messages: Sequence[Mapping[str, Any]], special: Mapping[str, Any]) -> str:
        """The prompt, including the text that opens the model's answer; InputError if the template raises an error.

        `messages` have `role` and `content` (a string, or a list of image and text items); `special`: further
        variables.
        """
        if self.of_videos is not None and any(_has_video(message) for message in messages):
            return self.of_videos.render(messages, special)
        # As in transformers, `tools` and `documents` are none, not undefined.
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True, **special}
        try:
            pieces, length = [], 0
            for piece in self.compiled.generate(**variables):
                pieces.append(piece)
                length += len(piece)
                _require_short(length)
            return "".join(pieces)
        except Exception as error:  # a template can raise any error
            raise InputError(f"{self.source}: the chat template refuses the prompt ({one_line(error)})") from None


def _has_video(message: Mapping[str, Any]) -> bool:
    return any(isinstance(item, dict) and item.get("type") == "video" for item in message.get("content") or ())


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
    # Without the HTML escapes of the filter of jinja2.
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _default(templates: Mapping[Any, T], source: str) -> T:
    """The template named "default"; InputError if there is none."""
    if "default" not in templates:
        names = ", ".join(map(str, templates))
        raise InputError(f"{source}: no chat template is named default (there are: {names}): name one of them default")
    return templates["default"]


def stored(name: str) -> str:
    """A prompt format in `vlkv/data/prompts`, for folders without a chat template."""
    return (DATA / "prompts" / f"{name}.jinja").read_text(encoding="utf-8")
