"""Command line options for models and policies, shared by several commands."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import jax

from vlkv import policies
from vlkv.analysis import profiles
from vlkv.compression.policy import EITHER
from vlkv.compression.slots import slots_of
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.families import Model, abstract
from vlkv.generation.generate import generate
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.policies import Policy, own, syntax
from vlkv.tools.benching.settings import make_inputs

_PROMPT, _VISION = 128, 64  # tokens of the prompt on which own policies are tried


def add_model_arguments(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Adds --model, which is required unless `options` (of `add_argument`) change this, and --dtype."""
    text = "a checkpoint folder, a hub id, mini (the demo model of vlkv), or smollm2 (a text model in a package)"
    parser.add_argument("--model", metavar="DIR", **{"required": True, "help": text, **options})
    choices = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", choices=choices, help="of the weights (default: as in the checkpoint)")


def add_policy_arguments(parser: argparse.ArgumentParser, *, default: str = "full", many: bool = False) -> None:
    """Adds --policy, --keep, --budget and --scope; `many`: lists of policies and keeps."""
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+"} if many else {}
    policy = (
        "a name of `vlkv policies`, with options as in \"aircache(window='text')\", several methods as in "
        '"compose(aircache, store=kivi(bits=4), answer=8)", or your own class as FILE.py:CLASS or NAME=FILE.py:CLASS '
        f"(default: {default})"
    )
    add("--policy", default=[default] if many else default, metavar="POLICY", help=policy, **several)
    keep = "share of the tokens in scope that is kept, in (0, 1], unless the policy contains a keep or budget"
    add("--keep", type=float, metavar="FRACTION", help=keep, **several)
    add("--budget", type=int, metavar="TOKENS", help="instead of --keep: tokens per layer, on average")
    scope = "what competes for the budget, unless the policy contains it (default: the method's; vision where methods "
    add("--scope", choices=["vision", "all"], help=f"{scope}with different defaults are compared)")


def require_least(args: argparse.Namespace, **least: int) -> None:
    """Raises InputError if an option is less than the number that is given for it; None means that it is absent."""
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise InputError(f"--{name.replace('_', '-')} {value} must be at least {smallest}")


def policy_from(args: argparse.Namespace, config: Callable[[], ModelConfig]) -> Policy:
    """The policy that the arguments describe. `config` returns that of the model, and is called if it is needed."""
    options = {name: getattr(args, name) for name in ("keep", "budget", "scope")}
    policy = policy_of(args.policy, options, config)
    try_own(policy, config)
    for name, value in options.items():
        if value is not None and getattr(policy, name) != value:
            raise InputError(f"--{name} {value} does not apply to {args.policy}: {_reason([policy], name)}")
    return policy


def policies_from(
    args: argparse.Namespace, config: Callable[[], ModelConfig], *, keep: float | None = None
) -> list[Policy]:
    """Every policy at every keep; a policy that contains its keep or budget, or keeps everything, occurs once."""
    return list(named_policies_from(args, config, keep=keep))


def named_policies_from(
    args: argparse.Namespace, config: Callable[[], ModelConfig], *, keep: float | None = None
) -> dict[Policy, str]:
    """The policies of `policies_from`, each with its name for tables: what the user wrote, without folders.

    `keep` is used if neither --keep nor --budget is given.
    """
    if args.budget is not None and args.keep:
        raise InputError("--keep and --budget: give only one of them")
    for text in args.policy:
        name, _, value = text.partition("=")
        if name in ("keep", "budget", "scope"):
            raise InputError(f"{text} is no policy, but an option: write --{name}={value}")
    asked = [{"keep": share} for share in args.keep or ()] or [{"budget": args.budget}]
    options = [{"keep": keep}] if keep is not None and args.keep is None and args.budget is None else asked
    scope = args.scope or common_scope(policy_of(text, options[0], config) for text in args.policy)
    plan: dict[Policy, str] = {}
    for text, name in labels(args.policy).items():
        for option in options:
            plan.setdefault(policy_of(text, {**option, "scope": scope}, config), name)
        try_own(next(reversed(plan)), config)
    parts = [owner for policy in plan for owner in slots_of(policy).owners]
    for name, value in (pair for option in asked for pair in option.items()):
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
    """The common scope of methods that select: "vision" if their own ones differ, else None."""
    scopes = {policy.scope for policy in plan if policy.facts.selects or slots_of(policy).reduce is not None}
    return "vision" if len(scopes) > 1 else None


def policy_of(text: str, defaults: dict[str, Any], config: Callable[[], ModelConfig]) -> Policy:
    """The policy of a text, with default options where it has none; a profile is read from its file."""

    def with_profile(cls: type[Policy], options: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(options.get("profile"), str):
            return options
        keep, scope = options.get("keep"), options.get("scope", cls.scope)
        return {**options, "profile": profiles.load(options["profile"], config(), keep=keep, scope=scope)}

    try:
        return syntax.parse(text, policies.named, defaults, with_profile)
    except InputError as error:
        if EITHER not in str(error):
            raise
        raise InputError(f"{error}; as options --keep or --budget") from None


def try_own(policy: Policy, config: Callable[[], ModelConfig]) -> None:
    """Calls `try_on_shapes` if a class of the policy is the user's own. `config` returns that of the model."""
    if own.classes(policy):
        try_on_shapes(policy, config())


def try_on_shapes(policy: Policy, config: ModelConfig) -> None:
    """Runs all stages of a policy in `generate` on the shapes of a model and of a prompt with an image, in seconds.

    Raises:
        InputError: a stage of an own class fails; one line with the file, the line and the error.
    """
    sampling = Greedy(max_new_tokens=slots_of(policy).answer + 2)
    inputs = make_inputs(config, 1, _PROMPT, 0 if config.vision is None else _VISION)

    def run(params: Model, inputs: Inputs, key: jax.Array) -> jax.Array:
        return generate(params, inputs, policy=policy, sampling=sampling, key=key).tokens

    with own.errors(*own.classes(policy), checks=True):
        jax.eval_shape(run, abstract(config), inputs, jax.random.key(0))
