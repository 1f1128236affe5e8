"""Checks of what users pass as policies, and of what their methods return."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.compression.observe import LayerContext, Observation
from vlkv.compression.policy import Policy
from vlkv.errors import InputError


def require_policy(given: object) -> None:
    """Raises InputError unless `given` is a policy."""
    if isinstance(given, Policy):
        return
    if isinstance(given, type) and issubclass(given, Policy):
        raise InputError(f"policy={given.__name__} is a class: pass an instance, such as {given.__name__}(keep=0.1)")
    if isinstance(given, str):
        raise InputError(f"policy={given!r} is a name: pass an instance, such as policies.make({given!r}, keep=0.1)")
    raise InputError(f"policy={given!r} is not a policy: pass one of vlkv.policies, or of your own subclass of Policy")


def checked_scores(policy: Policy, obs: Observation) -> Float[Array, "K T"]:
    """`policy.score`, or zeros if no token is in its scope; raises InputError if its shape is wrong."""
    if not obs.competes:
        return jnp.zeros(obs.k.shape[:2])
    scores, expected = policy.score(obs), obs.k.shape[:2]
    found = getattr(scores, "shape", None)
    if found != expected:
        raise InputError(f"{type(policy).__name__}: score returned {scores if found is None else f'shape {found}'}: "
                         f"return one number per key head and token, [K, T] = {expected}")  # fmt: skip
    return scores


def require_layers(policy: Policy, layers: int) -> None:
    """Raises InputError if the policy does not fit a model with this number of layers with full attention."""
    changes = policy.facts.selects or policy.storage or policy.reducer or policy.updater
    if layers == 0 and changes:
        raise InputError(f"{type(policy).__name__}: all layers of this model have a sliding window, so no cache grows "
                         "with the prompt, and there is nothing to compress: use full()")  # fmt: skip
    policy.check_model(layers)


def require_context(policy: Policy, context: LayerContext | None) -> None:
    """Raises InputError if the policy uses something of the model that is not known."""
    uses, name = policy.facts.uses, type(policy).__name__
    if uses and context is None:
        raise InputError(f"{name} uses more of the model than queries, keys and values ({', '.join(uses)}): use "
                         "generate or prefill, or give context=")  # fmt: skip
    if policy.facts.repeats is not None:
        repeated = None if context is None else context.repeated
        if repeated is None:
            raise InputError(f"{name} scores while the model repeats the prompt: use generate or prefill, or give the "
                             "policy to read_prompt")  # fmt: skip
        if repeated.instruction != policy.facts.repeats(policy):
            raise InputError(f"{name}: the prompt was repeated after another instruction: give the same policy to "
                             "read_prompt")  # fmt: skip
    if "output_norm" in uses and context is not None and context.output_norm is None:
        raise InputError(f"{name} uses norms that this prompt does not contain: give the policy to read_prompt")


def needs_own_prompt(policy: Policy) -> bool:
    """Whether `read_prompt` needs the policy: it reduces or repeats the prompt, or uses norms of projected values."""
    return policy.reducer is not None or policy.facts.repeats is not None or "output_norm" in policy.facts.uses
