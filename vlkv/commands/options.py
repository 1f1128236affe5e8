"""Command line options that say which policy, shared by the commands that run one."""

from __future__ import annotations

import argparse
import ast
from typing import Any

from vlkv import policies
from vlkv.errors import InputError


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """--policy, --keep, --budget, --scope and --option."""
    parser.add_argument("--policy", default="full", metavar="NAME", help="see `vlkv policies` (default: full)")
    parser.add_argument(
        "--keep", type=float, metavar="FRACTION", help="share of the tokens in scope that stays, in (0, 1]"
    )
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="instead of --keep: tokens per layer, on average")
    parser.add_argument(
        "--scope", choices=["vision", "all"], help="what competes for the budget (default: the method's)"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of the policy; may be repeated",
    )


def policy_from(args: argparse.Namespace) -> policies.Policy:
    """The policy that the arguments describe; InputError names what is wrong."""
    options: dict[str, Any] = {
        name: getattr(args, name) for name in ("keep", "budget", "scope") if getattr(args, name) is not None
    }
    for item in args.option:
        name, sign, value = item.partition("=")
        if not sign:
            raise InputError(f"--option {item}: expected NAME=VALUE")
        options[name] = _literal(value)
    return policies.make(args.policy, **options)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
