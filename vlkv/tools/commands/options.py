"""Command line options for models and policies, shared by several commands."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterable
from typing import Any

from vlkv import policies
from vlkv.analysis import profiles
from vlkv.config import ModelConfig
from vlkv.errors import InputError

_STAGES = ("allocate", "merge", "step", "reduce", "store")


def add_model_arguments(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Adds --model, which is required unless `options` (of `add_argument`) change this, and --dtype."""
    text = "a checkpoint folder, a hub id, or mini, the demo model of vlkv"
    parser.add_argument("--model", metavar="DIR", **{"required": True, "help": text, **options})
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: as in the checkpoint)"
    )


def add_policy_arguments(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """Adds --policy, --keep, --budget, --scope, --option and --with; `many`: lists of policies and keeps."""
    several: dict[str, Any] = {"nargs": "+"} if many else {}
    default, shown = (None, "snapkv") if many else ("full", "full")
    parser.add_argument(
        "--policy",
        default=default,
        metavar="NAME",
        help=f"see `vlkv policies`; FILE.py:CLASS is a method of your own (default: {shown})",
        **several,
    )
    parser.add_argument(
        "--keep", type=float, metavar="FRACTION", help="share of the tokens in scope that is kept, in (0, 1]", **several
    )
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="instead of --keep: tokens per layer, on average")
    parser.add_argument(
        "--scope",
        choices=["vision", "all"],
        help="what competes for the budget (default: the method's; vision where "
        "methods with different defaults are compared)",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of the policy; may be repeated",
    )
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="parts",
        metavar="STAGE=NAME",
        help=f"another method's stage ({', '.join(_STAGES)}), with options as in store=kivi(bits=4), or "
        "smooth=smooth(kernel=9); may be repeated",
    )


def policy_from(args: argparse.Namespace, config: Callable[[], ModelConfig]) -> policies.Policy:
    """The policy that the arguments describe; raises InputError for wrong arguments.

    Args:
        args: parsed.
        config: returns the config of the model; called only to check a profile.
    """
    options: dict[str, Any] = {
        name: getattr(args, name) for name in ("keep", "budget", "scope") if getattr(args, name) is not None
    }
    for item in args.option:
        name, sign, value = item.partition("=")
        if not sign:
            raise InputError(f"--option {item}: expected NAME=VALUE")
        options[name] = _literal(value)
    policy = _make(args.policy, options, config)
    parts: dict[str, Any] = {}
    for item in args.parts:
        stage, part = _part(item, config)
        if stage in parts:
            raise InputError(f"--with {item}: {stage} is given twice")
        parts[stage] = part
    return policies.compose(policy, **parts) if parts else policy


def common_scope(methods: Iterable[type[policies.Policy]]) -> policies.Scope | None:
    """The common scope of compared methods: "vision" if their defaults differ, else None (their default).

    Methods that keep everything are ignored.
    """
    scopes = {cls.scope for cls in methods if not issubclass(cls, policies.Full)}
    return "vision" if len(scopes) > 1 else None


def policy_called(
    text: str, where: str, config: Callable[[], ModelConfig]
) -> tuple[type[policies.Policy], dict[str, Any]]:
    """Parses "kivi" or "kivi(bits=4)": the class and its options; a profile is read from its file.

    Args:
        text: the argument.
        where: its description in messages.
        config: as in `policy_from`.
    """
    name, bracket, _ = text.partition("(")
    if not bracket:
        return policies.named(name), {}
    return policies.named(name), _with_profile(name, _options(text, where), config)


def _options(text: str, where: str) -> dict[str, Any]:
    """Parses the options in "kivi(bits=4)"."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        assert isinstance(call, ast.Call) and not call.args and all(word.arg for word in call.keywords)
        options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        assert len(options) == len(call.keywords)
    except (AssertionError, ValueError, SyntaxError):
        raise InputError(f"{where}: expected NAME(OPTION=VALUE, ...)") from None
    return options


def _make(name: str, options: dict[str, Any], config: Callable[[], ModelConfig]) -> policies.Policy:
    return policies.make(name, **_with_profile(name, options, config))


def _with_profile(name: str, options: dict[str, Any], config: Callable[[], ModelConfig]) -> dict[str, Any]:
    """The options, with the file name of a profile replaced by the profile."""
    if not isinstance(options.get("profile"), str):
        return options
    scope = options.get("scope", policies.named(name).scope)
    return {**options, "profile": profiles.load(options["profile"], config(), scope=scope)}


def _part(item: str, config: Callable[[], ModelConfig]) -> tuple[str, Any]:
    """Parses "store=kivi(bits=4)": the stage, and the method with its options or its class."""
    stage, _, text = item.partition("=")
    if stage == "smooth":
        options = _options(text, f"--with {item}")
        try:
            return stage, policies.Smooth(**options)
        except TypeError:
            raise InputError(f"--with {item}: Smooth has the options kernel, one_sided and pooling") from None
    if stage not in _STAGES or not text.partition("(")[0]:
        raise InputError(f"--with {item}: expected STAGE=NAME with a stage among {', '.join(_STAGES)}")
    cls, options = policy_called(text, f"--with {item}", config)
    return stage, policies.make(cls, **options) if "(" in text else cls


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
