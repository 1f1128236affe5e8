"""Checks of what users pass as policies, and of what their methods return."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vlkv.compression.observe import LayerContext, Observation
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import stage_of
from vlkv.errors import InputError


def require_policy(policy: object) -> None:
    """Raises InputError unless this is a policy."""
    if isinstance(policy, Policy):
        return
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise InputError(f"policy={policy.__name__} is a class: pass an instance, such as {policy.__name__}(keep=0.1)")
    if isinstance(policy, str):
        raise InputError(f"policy={policy!r} is a name: pass an instance, such as policies.make({policy!r}, keep=0.1)")
    raise InputError(f"policy={policy!r} is not a policy: pass one of vlkv.policies, or of your own subclass of Policy")


def checked_scores(policy: Policy, obs: Observation) -> Float[Array, "K T"]:
    """The scores of a policy, or zeros if no token is in its scope. Raises InputError if their shape is wrong."""
    if not obs.competes:
        return jnp.zeros(obs.k.shape[:2])
    scores, expected = policy.score(obs), obs.k.shape[:2]
    shape = getattr(scores, "shape", None)
    if shape != expected:
        raise InputError(f"{type(policy).__name__}: score returned {scores if shape is None else f'shape {shape}'}: "
                         f"return one number per key head and token, [K, T] = {expected}")  # fmt: skip
    return scores


def require_reselection(policy: Policy) -> None:
    """Raises InputError if the entries of a cache shall be selected again, and this policy cannot do that."""
    slots = slots_of(policy)
    if not slots.every:
        return
    name, newest = type(slots.score).__name__, slots.newest
    refused = {
        f"scope={policy.scope!r} never evicts text, so the cache would grow: give scope='all'": policy.scope != "all",
        f"{name} keeps every token: give a method that evicts": not slots.score.facts.selects,
        f"{type(slots.step).__name__} evicts in every step: switch that off (evict=False), or every=": bool(slots.step),
        f"{type(slots.reduce).__name__} reduces the prompt: leave out reduce=, or give it to Chat.watch": slots.reduce
        is not None,
        "cap limits layers during prefill only: leave out cap": policy.cap is not None,
        f"{name} repeats the prompt, and nothing is repeated later": slots.repeats is not None,
        f"{name} uses norms that are known only of the prompt": "output_norm" in slots.uses,
        "entries with unequal bits cannot be selected again": slots.storage is not None
        and slots.storage.budget_digits is not None,
        "images are smoothed only in the prompt: give smooth= a number": slots.smooth is not None
        and not isinstance(slots.smooth.kernel, int),
        f"the newest {newest} tokens observe: give every={newest} or more, or a smaller window": newest > slots.every,
    }
    for reason, holds in refused.items():
        if holds:
            raise InputError(f"every={slots.every}: {reason}")


def require_layers(policy: Policy, layers: int) -> None:
    """Raises InputError if the policy does not fit a model with `layers` layers with full attention."""
    slots = slots_of(policy)
    changes = policy.facts.selects or slots.store or slots.reduce or slots.step
    if layers == 0 and changes:
        raise InputError(f"{type(policy).__name__}: all layers of this model have a sliding window, so no cache grows "
                         "with the prompt, and there is nothing to compress: use full()")  # fmt: skip
    if slots.smooth is not None:
        slots.smooth.check_model(layers)
    for owner in slots.owners:
        stage_of(owner, "check_model")(layers)
        dropped = slots.reduce is not None and any(slots.reduce.reductions(layers))
        if dropped and "same tokens" in stage_of(owner, "needs"):
            raise InputError(
                f"compose: {type(owner).__name__} compares the tokens of successive layers, and "
                f"{type(slots.reduce).__name__} drops tokens between them: leave out one of the two"
            )


def require_context(policy: Policy, context: LayerContext | None) -> None:
    """Raises InputError if the policy uses something of the model (`Stages.uses`, `repeats`) that is not given."""
    slots, name = slots_of(policy), type(policy).__name__
    if (uses := [use for use in slots.uses if use != "grid"]) and context is None:
        raise InputError(f"{name} uses more of the model than queries, keys and values ({', '.join(uses)}): use "
                         "generate or prefill, or give context=")  # fmt: skip
    if slots.repeats is not None:
        repeated = None if context is None else context.repeated
        if repeated is None:
            raise InputError(f"{name} scores while the model repeats the prompt: use generate or prefill, or give the "
                             "policy to read_prompt")  # fmt: skip
        if repeated.instruction != slots.repeats:
            raise InputError(f"{name}: the prompt was repeated after another instruction: give the same policy to "
                             "read_prompt")  # fmt: skip
    if "output_norm" in slots.uses and context is not None and context.output_norm is None:
        raise InputError(f"{name} uses norms that this prompt does not contain: give the policy to read_prompt")


def needs_own_prompt(policy: Policy) -> bool:
    """Whether `read_prompt` needs the policy: it reduces or repeats the prompt, or uses norms of projected values."""
    slots = slots_of(policy)
    return slots.reduce is not None or slots.repeats is not None or "output_norm" in slots.uses


def require_32_bits() -> None:
    """Raises InputError if `jax_enable_x64` is on, which changes the dtypes of counts and of kernel states."""
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        raise InputError("vlkv computes in 32 bits: switch jax_enable_x64 off, or call it within jax.enable_x64(False)")


def require_fit(policy: Policy, layers: int, key: Key[Array, ""] | None, *, max_new_tokens: int | None = None) -> None:
    """Checks a policy before the model runs.

    Args:
        policy: what the user has given.
        layers: number of layers with full attention.
        key: random key.
        max_new_tokens: length of the answer, if the caller can compress the cache during it (`Slots.answer`); else
            None.

    Raises:
        InputError: this is not a policy, it does not fit the model, it needs a key, or jax is set to 64 bits.
    """
    require_policy(policy)
    require_32_bits()
    slots = slots_of(policy)
    answer = slots.answer
    if answer and max_new_tokens is None:
        raise InputError(f"answer={answer} compresses the cache during an answer, as generate, stream, score, vlkv "
                         "generate, eval and frontier can: use these, or leave out answer=")  # fmt: skip
    if answer and max_new_tokens is not None and answer > max_new_tokens - 2:
        raise InputError(
            f"answer={answer}: the full cache gives {answer + 1} tokens, and max_new_tokens={max_new_tokens} (or as "
            f"many targets) leaves none to the compressed cache: give at least {answer + 2}"
        )
    require_layers(policy, layers)
    require_reselection(policy)
    if slots.needs_key and key is None:
        raise InputError(f"{type(policy).__name__} draws at random: pass key=jax.random.key(seed)")
