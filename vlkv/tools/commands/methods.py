"""List the policies with their stages, scope, defaults and papers, describe one with its source, or try your own.

  vlkv policies
  vlkv policies aircache
  vlkv policies examples/own_method.py:KeyNorm --check

--check runs all stages on shapes, in seconds, and names the line of your file that fails. Commands with --policy do
the same with the shapes of their model before they read its weights.
"""

import argparse
import dataclasses
import inspect
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from vlkv import policies
from vlkv.errors import InputError
from vlkv.families.folders import read_config
from vlkv.mini import CHECKPOINT
from vlkv.tools.commands.options import policy_of, try_on_shapes

_COMMON = ("keep", "budget", "scope", "cap")  # options that all methods have


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv policies`."""
    add = parser.add_argument
    check = "run the policy NAME, perhaps with options in brackets, on the shapes of the demo model"
    add("name", nargs="?", metavar="NAME", help="describe this one")
    add("--check", action="store_true", help=check)
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """A table or a description, or the content for JSON; or what a trial says."""
    if args.check:
        return _check(args)
    classes = (policies.registry | policies.without_keep).values()
    described = [describe(cls) for cls in (classes if args.name is None else [policies.named(args.name)])]
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


def _check(args: argparse.Namespace) -> Any:
    """Tries a policy on shapes, with half of the tokens if it has no keep of its own."""
    if args.name is None:
        raise InputError("--check tries one policy: give its NAME, such as FILE.py:CLASS")
    policy = policy_of(args.name, {"keep": 0.5}, lambda: read_config(CHECKPOINT))
    try_on_shapes(policy, read_config(CHECKPOINT))
    result = {"policy": policies.text_of(policy), "stages": policy.facts.stages, "model": "mini"}
    return result if args.json else f"{result['policy']}: runs on the shapes of mini (stages: {result['stages']})"


def describe(cls: type[policies.Policy]) -> dict[str, Any]:
    """The description of one policy, as JSON."""
    options = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    facts = {name: getattr(cls.facts, name) for name in ("stages", "paper", "equations", "source")}
    description = inspect.cleandoc(cls.__doc__ or "")
    return {"name": cls.__name__, "scope": options["scope"], **facts, "options": options, "description": description}


def _prose(method: dict[str, Any]) -> str:
    options = "\n".join(f"  {name} = {value!r}" for name, value in method["options"].items())
    names = ("paper", "equations", "source", "stages")
    facts = "".join(f"{name.capitalize()}: {method[name]}\n" for name in names if method[name])
    return f"{method['name']}: {method['description']}\n\n{facts}Options:\n{options}"
