"""What commands share at the terminal: help, one line for bad input, JSON for machines, exit status 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from vlkv.errors import InputError


class _Help(argparse.HelpFormatter):
    """Fills paragraphs to the terminal's width, but not examples (`vlkv ...`), and says what the defaults are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (
            textwrap.indent(textwrap.dedent(part), "  ") if part.lstrip().startswith(("vlkv ", "python -m "))
            else super(_Help, self)._fill_text(part, width, indent)
            for part in text.strip("\n").split("\n\n")
        )  # fmt: skip
        return "\n\n".join(lines)

    def _get_help_string(self, action: argparse.Action) -> str:
        said = action.help or ""
        told = "default" in said or action.default in (None, False, [], argparse.SUPPRESS)
        return said if told else f"{said} (default: {_shown(action.default)})".strip()


def _shown(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text.replace("%", "%%")


class OneLineParser(argparse.ArgumentParser):
    """argparse, but an error is one line, and help shows defaults and keeps indented examples."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and exits with 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def guarded(command: Callable[[], Any]) -> int:
    """Runs a command and prints what it returns; bad input is one line on stderr and status 2."""
    try:
        result = command()
        if result is not None:
            print(result if isinstance(result, str) else json.dumps(result, indent=2))
        sys.stdout.flush()
    except BrokenPipeError:  # as in `vlkv policies | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (InputError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
