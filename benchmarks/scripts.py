"""The command lines of the scripts, whose options are in options.toml."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlkv.terminal import Help, OneLineParser, add_options, guarded


class _Written(argparse.RawDescriptionHelpFormatter, Help):
    """Leaves the lines of the description as they are."""


def parse(
    name: str,
    description: str | None,
    argv: Sequence[str] | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> argparse.Namespace:
    """The arguments of `python -m benchmarks.NAME`; `changes` as in `add_options`."""
    parser = OneLineParser(prog=f"python -m benchmarks.{name}", description=description, formatter_class=_Written)
    add_options(parser, Path(__file__).with_name("options.toml"), name, changes)
    return parser.parse_args(argv)


def run(command: Callable[[argparse.Namespace], Any], *arguments: Any) -> int:
    """Runs a command with the arguments from `parse`, and prints its result or error; returns the exit status."""
    args = parse(*arguments)
    return guarded(lambda: command(args))


def some_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Changes for an option that takes some of these names, by default all."""
    return {"choices": list(names), "default": list(names)}
