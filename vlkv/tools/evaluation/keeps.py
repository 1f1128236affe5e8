"""Sets the keep and the bits of policies to compare them at equal bytes; one compiled program serves all keeps."""

from collections.abc import Iterator, Sequence
from typing import Any

from vlkv.compression.compose import at_keep, compose
from vlkv.compression.policy import Policy
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.sizes import Budget, budget_of, total_bound
from vlkv.compression.slots import slots_of
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.generation.prompt import Prompt
from vlkv.inputs import Inputs
from vlkv.policies.kivi import KIVI


def at_bytes(policy: Policy, share: float, bits: int = 16, *, head_dim: int = 128) -> Policy:
    """The policy with entries stored in `bits` bits, and with the `keep` that takes `share` of the bytes.

    With 16 bits the policy may have a storage of its own; with fewer, `KIVI` stores the entries. `share` is relative to
    the bytes of all tokens in scope in 16 bits. Raises InputError if an option of the policy contradicts the keep.
    """
    if bits == 16:
        storage = slots_of(policy).storage
        digits = None if storage is None else storage.budget_digits
        entries = 1 if digits is None else digits[1]  # for each token of the budget
        return at_keep(policy, min(1.0, share / (entries * relative_size(policy, head_dim=head_dim))))
    store = KIVI(bits=bits)
    return compose(at_keep(policy, min(1.0, share / relative_size(store))), store=store)


def relative_size(policy: Policy, *, number: int = 2, head_dim: int = 128) -> float:
    """Bytes of a stored entry, relative to an entry that is not quantised and has `number` bytes per channel."""
    storage = slots_of(policy).storage
    return 1.0 if storage is None else storage.bytes_per_number(number, head_dim) / number


def share_programs(plan: Sequence[Policy]) -> list[Policy]:
    """For each policy, the policy whose compiled program it uses: the one with the same options and the largest keep.

    A policy that reduces the prompt, caps its layers or compresses during the answer uses its own program, and so does
    a user's method, whose stages may use `self.keep`. Stages of this package use it only where the largest keep serves
    all (bounds on sizes).
    """
    largest: dict[Any, Policy] = {}
    keys = [_program_key(policy) or policy for policy in plan]
    for key, policy in zip(keys, plan, strict=True):
        before = largest.get(key)
        if before is None or (policy.keep or 1) > (before.keep or 1):
            largest[key] = policy
    return [largest[key] for key in keys]


def groups(plan: Sequence[Policy], todo: Sequence[int], first: int, then: int) -> Iterator[list[int]]:
    """The indices `todo` of policies in groups with at most `first` programs, and `then` in later groups."""
    programs, group, limit = share_programs(plan), list[int](), first
    for i in todo:
        if len({programs[j] for j in (*group, i)}) > limit:
            yield group
            group, limit = [], then
        group.append(i)
    yield group


def _program_key(policy: Policy) -> tuple[Policy, float] | None:
    """A key that is equal for policies that differ only in `keep`; None if the policy cannot share its program."""
    slots = slots_of(policy)
    if slots.reduce is not None or policy.cap is not None or policy.keep is None or slots.answer:
        return None
    if not slots.follows_paper or not all(type(part).__module__.startswith("vlkv.policies.") for part in slots.owners):
        return None
    if any(isinstance(part, ReducingPolicy) for part in slots.owners):  # rounds of merging depend on the keep
        return None
    try:
        return at_keep(policy, 1.0), slots.softmax_n
    except InputError:
        return None  # another option depends on the keep


def budget(policy: Policy, program: Policy, prompt: Prompt) -> Budget | None:
    """`policy`'s budget as arrays, for `fill_cache_with` and the program of `program`; None if both are the same."""
    if policy is program:
        return None
    return budget_of(policy, layers=len(prompt.layers), most=prompt.valid.shape[1], text=prompt.bounds.text)


def share_of_bytes(policy: Policy, config: ModelConfig, inputs: Inputs) -> float:
    """Bytes of the vision entries that a policy may keep, as a share of the bytes of all vision entries in 16 bits.

    With scope="all", text entries are counted too, both in the kept entries and in the total.
    """
    layers, text = config.decoder.full_layers, inputs.max_text
    if layers == 0:
        return 1.0
    vision, kept = inputs.max_vision, total_bound(policy, layers=layers, **inputs.bounds.sizes)
    kept, total = (kept - layers * text, vision) if policy.scope == "vision" else (kept, vision + text)
    return kept * relative_size(policy, head_dim=config.decoder.head_dim) / (layers * total)
