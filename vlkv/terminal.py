"""Help texts, error messages and output that all commands share."""

import argparse
import contextlib
import itertools
import json
import os
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from vlkv.errors import InputError, shortened, suggestion

T = TypeVar("T")
INTERRUPTED = 130  # exit status after Ctrl-C, as in shells
_FIRST, _EVERY = 2.0, 15.0  # seconds before the first line of progress and between two, where there is no terminal


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs, except examples (`vlkv ...`), at the width of the terminal, and shows defaults."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        def paragraph(part: str) -> str:
            if part.lstrip().startswith(("vlkv ", "python -m ")):
                return textwrap.indent(textwrap.dedent(part), "  ")
            return super(_Help, self)._fill_text(part, width, indent)

        return "\n\n".join(map(paragraph, text.strip("\n").split("\n\n")))

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
        """Refuses unknown arguments by name, options before argparse asks for arguments that are missing.

        If there are commands, each refuses what follows its name, so that errors point to its help.
        """
        known = [option for option in self._option_string_actions if option != "--help"]
        arguments = list(sys.argv[1:] if args is None else args)
        is_mine = (lambda text: text.startswith("-")) if self._subparsers else (lambda text: text != "--")
        for argument in itertools.takewhile(is_mine, arguments):
            name = argument.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in ("--help", *known)):
                self.error(f"no option {name}; {suggestion(name, known, 'see the list of options')}")
        parsed, others = super().parse_known_args(args, namespace)
        if others and not self._subparsers:
            name, _, value = others[0].partition("=")
            option = value and f"--{name}" in known
            self.error(f"{others[0]} is no option: write --{name}={value}" if option else f"no argument {others[0]}")
        return parsed, others

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuses an unknown command or choice, with a similar one."""
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = suggestion(str(value), names, f"choose from {', '.join(names)}")
            self.error(f"{argparse._get_action_name(action)}: {value!r} does not exist; {hint}")

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        self.exit(2, f"error: {shortened(message)} (see {self.prog} --help)\n")


def track(items: Iterable[T], label: str) -> Iterator[T]:
    """Yields the items, with a progress bar as in `progress_bar`."""
    known = list(items)
    with progress_bar(label, len(known)) as advance:
        for item in known:
            yield item
            advance()


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, or lines of text if that is no terminal.

    Yields `advance(count=1, text=label, left=True)`.

    Args:
        label: text before the bar. `advance` is called after each step, and may replace it; `advance(0, text)` says
            what begins now, and with `left=False` that it is no step whose time says how long the others will take.
        total: number of steps.
        hidden: show nothing.
    """
    from rich.console import Console  # noqa: PLC0415 (slow to import)
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        lines = _Lines(label, total)
        with contextlib.nullcontext() if hidden else lines.shown():
            yield lines.advance
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)

        def advance(count: int = 1, text: str = label, left: bool = True) -> None:
            del left
            bar.update(task, advance=count, description=text)

        yield advance


class _Lines:
    """Progress as lines of text, for files and pipes."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.text, self.total = label, "", total
        self.done, self.seconds, self.since, self.left = 0, 0.0, time.monotonic(), True

    def advance(self, count: int = 1, text: str = "", left: bool = True) -> None:
        """Counts finished steps and keeps the text to show, like the `advance` that `progress_bar` yields."""
        now = time.monotonic()
        self.seconds += now - self.since if self.left else 0
        self.done, self.since, self.text, self.left = self.done + count, now, text, left

    def line(self) -> str:
        """What is going on, and an estimate of the time that is left, once there is one."""
        text = self.text or f"{self.label}, {min(self.done + 1, self.total)} of {self.total}"
        if not self.left or not 0 < self.done < self.total:
            return text
        left = self.seconds / self.done * (self.total - self.done)
        return f"{text}, {f'{left:.0f} s' if left < 90 else f'{left / 60:.0f} min'} left"

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Prints the line from time to time, from a thread, because a step may take minutes."""
        stop = threading.Event()

        def repeat() -> None:
            pause = _FIRST
            while not stop.wait(pause):
                print(self.line(), file=sys.stderr, flush=True)
                pause = _EVERY

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


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
        return INTERRUPTED
    return 0
