"""Command line options that say which policy, shared by the commands that run one."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterable
from typing import Any

from vlkv import policies, profiles
from vlkv.config import ModelConfig
from vlkv.errors import InputError

_STAGES = ("allocate", "merge", "step", "reduce", "store")


def add_model_arguments(parser: argparse.ArgumentParser, **options: Any) -> None:
    """--model, required unless `options` (of `add_argument`) say otherwise, and --dtype."""
    said = "a checkpoint folder, a hub id, or mini, the demo model that vlkv ships"
    parser.add_argument("--model", metavar="DIR", **{"required": True, "help": said, **options})
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: their own)"
    )


def add_policy_arguments(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """--policy, --keep, --budget, --scope, --option and --with; `many`: lists of policies and keeps."""
    several: dict[str, Any] = {"nargs": "+"} if many else {}
    default, said = (None, "snapkv") if many else ("full", "full")
    parser.add_argument(
        "--policy",
        default=default,
        metavar="NAME",
        help=f"see `vlkv policies`; FILE.py:CLASS is a method of your own (default: {said})",
        **several,
    )
    parser.add_argument(
        "--keep", type=float, metavar="FRACTION", help="share of the tokens in scope that stays, in (0, 1]", **several
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
    """The policy that the arguments describe; InputError names what is wrong.

    Args:
        args: parsed.
        config: reads the model's config, if a profile must be checked against it.
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
    """The scope of methods that are compared, unless the user names one: "vision" if their defaults differ.

    None: their defaults agree. Methods that keep everything have no scope.
    """
    scopes = {cls.scope for cls in methods if not issubclass(cls, policies.Full)}
    return "vision" if len(scopes) > 1 else None


def policy_called(
    text: str, where: str, config: Callable[[], ModelConfig]
) -> tuple[type[policies.Policy], dict[str, Any]]:
    """ "kivi" or "kivi(bits=4)": the class, and its options, with a profile read from its file.

    Args:
        text: what was given.
        where: names it in messages.
        config: as in `policy_from`.
    """
    name, bracket, _ = text.partition("(")
    if not bracket:
        return policies.named(name), {}
    return policies.named(name), _with_profile(name, _options(text, where), config)


def _options(text: str, where: str) -> dict[str, Any]:
    """The options in "kivi(bits=4)"."""
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
    """The options with a profile read from its file."""
    if not isinstance(options.get("profile"), str):
        return options
    scope = options.get("scope", policies.named(name).scope)
    return {**options, "profile": profiles.load(options["profile"], config(), scope=scope)}


def _part(item: str, config: Callable[[], ModelConfig]) -> tuple[str, Any]:
    """ "store=kivi(bits=4)": the stage, and the method with its options or its class."""
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
