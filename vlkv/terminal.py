"""Help texts, error messages and output that all commands share."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from vlkv.errors import InputError, shortened, suggestion

T = TypeVar("T")


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs, except examples (`vlkv ...`), at the width of the terminal, and shows defaults."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (
            textwrap.indent(textwrap.dedent(part), "  ") if part.lstrip().startswith(("vlkv ", "python -m "))
            else super(_Help, self)._fill_text(part, width, indent)
            for part in text.strip("\n").split("\n\n")
        )  # fmt: skip
        return "\n\n".join(lines)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        complete = "default" in text or action.default in (None, False, [], argparse.SUPPRESS)
        return text if complete else f"{text} (default: {_shown(action.default)})".strip()


def _shown(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text.replace("%", "%%")


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line, and with `_Help`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses an unknown option by its name, before argparse asks for the arguments that are missing."""
        known = self._option_string_actions
        given = list(sys.argv[1:] if args is None else args)
        for argument in () if self._subparsers else itertools.takewhile(lambda text: text != "--", given):
            name = argument.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                self.error(f"no option {name}; {suggestion(name, known, 'see the list of options')}")
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuses an unknown command or choice, with a similar one."""
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = suggestion(str(value), names, f"choose from {', '.join(names)}")
            self.error(f"{argparse._get_action_name(action)}: {value!r} does not exist; {hint}")

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        message = re.sub(r"unrecognized arguments: (\w+=\S+)", r"\1 is no option: write --\1", message)
        self.exit(2, f"error: {shortened(message)} (see {self.prog} --help)\n")


def track(items: Iterable[T], label: str) -> Iterable[T]:
    """Yields the items, with a progress bar on stderr if that is a terminal."""
    from rich.console import Console  # noqa: PLC0415 (slow to import)
    from rich.progress import track as rich_track  # noqa: PLC0415

    console = Console(stderr=True)
    return rich_track(items, label, console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr if that is a terminal; yields `advance(count=1, text=label)`, to call after each step.

    Args:
        label: text before the bar; `advance` may replace it.
        total: number of steps.
        hidden: show nothing.
    """
    from rich.console import Console  # noqa: PLC0415 (slow to import)
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)

        def advance(count: int = 1, text: str = label) -> None:
            bar.update(task, advance=count, description=text)

        yield advance


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print("warning:", message, file=sys.stderr)


def guarded(command: Callable[[], Any]) -> int:
    """Runs a command and prints its result, a text or JSON. Bad input gives one line on stderr and exit status 2.

    A warning is one line on stderr too.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            result = command()
        if result is not None:
            print(result if isinstance(result, str) else json.dumps(result, indent=2))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `vlkv policies | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (InputError, OSError) as error:
        print("error:", shortened(" ".join(str(error).split())), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
