"""List the policies with their stages, scope, defaults and papers, or describe one with its source.

vlkv policies
vlkv policies aircache
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from vlkv import policies

_COMMON = ("keep", "budget", "scope", "cap")  # options that all methods have
_FACTS = ("paper", "equations", "source", "stages")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv policies`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="describe this one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """A table or a description, or the content for JSON."""
    every = (policies.registry | policies.without_keep).values()
    chosen = every if args.name is None else [policies.named(args.name)]
    described = [describe(cls) for cls in chosen]
    if args.json:
        return described if args.name is None else described[0]
    if args.name is not None:
        return _prose(described[0])
    table = Table(Column("policy", no_wrap=True), "changes", "scope", "options", "paper")
    for method in described:
        options = ", ".join(f"{k}={v}" for k, v in method["options"].items() if k not in _COMMON)
        table.add_row(method["name"], method["stages"], method["scope"], options, method["paper"].partition(",")[0])
    Console().print(table)
    return None


def describe(cls: type[policies.Policy]) -> dict[str, Any]:
    """The description of one policy, as JSON."""
    options = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return {
        "name": cls.__name__,
        "stages": cls.facts.stages,
        "scope": options["scope"],
        "paper": cls.facts.paper,
        "equations": cls.facts.equations,
        "source": cls.facts.source,
        "options": options,
        "description": inspect.cleandoc(cls.__doc__ or ""),
    }


def _prose(method: dict[str, Any]) -> str:
    options = "\n".join(f"  {name} = {value!r}" for name, value in method["options"].items())
    facts = "".join(f"{key.capitalize()}: {method[key]}\n" for key in _FACTS if method[key])
    return f"{method['name']}: {method['description']}\n\n{facts}{options}"
