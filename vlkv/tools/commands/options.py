"""Command line options for models and policies, shared by several commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from vlkv import policies
from vlkv.analysis import profiles
from vlkv.compression.policy import EITHER
from vlkv.compression.slots import slots_of
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.policies import Policy, syntax
from vlkv.tools.commands.trial import try_own


def add_model_arguments(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Adds --model, which is required unless `options` (of `add_argument`) change this, and --dtype."""
    text = "a checkpoint folder, a hub id, mini (the demo model of vlkv), or smollm2 (a text model in a package)"
    parser.add_argument("--model", metavar="DIR", **{"required": True, "help": text, **options})
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: as in the checkpoint)"
    )


def add_policy_arguments(parser: argparse.ArgumentParser, *, default: str = "full", many: bool = False) -> None:
    """Adds --policy, --keep, --budget and --scope; `many`: lists of policies and keeps."""
    several: dict[str, Any] = {"nargs": "+"} if many else {}
    parser.add_argument(
        "--policy",
        default=[default] if many else default,
        metavar="POLICY",
        help="a name of `vlkv policies`, with options as in \"aircache(window='text')\", several methods as in "
        '"compose(aircache, store=kivi(bits=4), answer=8)", or your own class as FILE.py:CLASS or NAME=FILE.py:CLASS '
        f"(default: {default})",
        **several,
    )
    parser.add_argument(
        "--keep", type=float, metavar="FRACTION", help="share of the tokens in scope that is kept, in (0, 1], unless "
        "the policy contains a keep or budget", **several,
    )  # fmt: skip
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="instead of --keep: tokens per layer, on average")
    parser.add_argument(
        "--scope",
        choices=["vision", "all"],
        help="what competes for the budget, unless the policy contains it (default: the method's; vision where methods "
        "with different defaults are compared)",
    )


def policy_from(args: argparse.Namespace, config: Callable[[], ModelConfig]) -> Policy:
    """The policy that the arguments describe.

    Args:
        args: parsed.
        config: returns the config of the model; called only to check a profile.

    Raises:
        InputError: wrong arguments, or --keep, --budget or --scope that the policy contradicts.
    """
    given = {name: getattr(args, name) for name in ("keep", "budget", "scope")}
    made = policy_of(args.policy, given, config)
    try_own(made, config)
    for name, value in given.items():
        if value is not None and getattr(made, name) != value:
            raise InputError(f"--{name} {value} does not apply to {args.policy}: {_reason([made], name)}")
    return made


def policies_from(
    args: argparse.Namespace, config: Callable[[], ModelConfig], *, keep: float | None = None
) -> list[Policy]:
    """Every policy at every keep; a policy that contains its keep or budget, or keeps everything, occurs once."""
    return list(named_policies_from(args, config, keep=keep))


def named_policies_from(
    args: argparse.Namespace, config: Callable[[], ModelConfig], *, keep: float | None = None
) -> dict[Policy, str]:
    """The policies of `policies_from`, each with its name for tables: what the user wrote, without folders.

    Args:
        args: parsed.
        config: as in `policy_from`.
        keep: if neither --keep nor --budget is given.

    Raises:
        InputError: wrong arguments, or a --keep or --budget that no policy uses.
    """
    if args.budget is not None and args.keep:
        raise InputError("--keep and --budget: give only one of them")
    for text in args.policy:
        name, _, value = text.partition("=")
        if name in ("keep", "budget", "scope"):
            raise InputError(f"{text} is no policy, but an option: write --{name}={value}")
    asked = [{"keep": share} for share in args.keep or ()] or [{"budget": args.budget}]
    given = [{"keep": keep}] if keep is not None and args.keep is None and args.budget is None else asked
    scope = args.scope or common_scope(policy_of(text, given[0], config) for text in args.policy)
    plan: dict[Policy, str] = {}
    for text, name in labels(args.policy).items():
        for one in given:
            plan.setdefault(policy_of(text, {**one, "scope": scope}, config), name)
        try_own(next(reversed(plan)), config)
    parts = [owner for policy in plan for owner in slots_of(policy).owners]
    for name, value in (pair for one in asked for pair in one.items()):
        if value is not None and all(getattr(part, name) != value for part in parts):
            raise InputError(f"--{name} {value} does not apply to {', '.join(plan.values())}: {_reason(plan, name)}")
    return plan


def _reason(plan: Iterable[Policy], name: str) -> str:
    """Why policies do not use --keep or --budget."""
    if all(policy.keep == 1 for policy in plan):
        return "it keeps all tokens; give a --policy"
    return f"it has its own {name}"


def labels(texts: Iterable[str]) -> dict[str, str]:
    """The names of policies in tables and plots, by their texts: the texts without folders, unless two become equal."""
    short = {text: syntax.short(text) for text in texts}
    names = list(short.values())
    return {text: text if names.count(name) > 1 else name for text, name in short.items()}


def common_scope(plan: Iterable[Policy]) -> policies.Scope | None:
    """The common scope of compared methods: "vision" if their own ones differ, else None.

    Methods that keep everything are ignored.
    """
    scopes = {policy.scope for policy in plan if policy.facts.selects or slots_of(policy).reduce is not None}
    return "vision" if len(scopes) > 1 else None


def policy_of(text: str, given: dict[str, Any], config: Callable[[], ModelConfig]) -> Policy:
    """The policy of a text, with `given` options where it has none; a profile is read from its file."""

    def with_profile(cls: type[Policy], options: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(options.get("profile"), str):
            return options
        keep, scope = options.get("keep"), options.get("scope", cls.scope)
        return {**options, "profile": profiles.load(options["profile"], config(), keep=keep, scope=scope)}

    try:
        return syntax.parse(text, policies.named, given, with_profile)
    except InputError as error:
        if EITHER not in str(error):
            raise
        raise InputError(f"{error}; as options --keep or --budget") from None
