"""Help texts, error messages and output that all commands share."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from vlkv.errors import InputError, shortened


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

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        self.exit(2, f"error: {shortened(message)} (see {self.prog} --help)\n")


def guarded(command: Callable[[], Any]) -> int:
    """Runs a command and prints its result, a text or JSON. Bad input gives one line on stderr and exit status 2."""
    try:
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
