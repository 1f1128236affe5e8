"""Methods that vlkv and kvpress both have, with equal options. A further method is one more line in `METHODS`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from vlkv import policies
from vlkv.policies import Policy
from vlkv.processing import Processor

_REPEAT = ("\n\nRepeat the previous context exactly.", "\n")  # KVzip's instruction, in the parts that the press encodes


class Method(NamedTuple):
    """The same method on both sides."""

    text: str  # of the policy, without its keep
    difference: str = ""  # why the kept entries differ, if they do

    def policy(self, keep: float, processor: Processor) -> Policy:
        """The policy, with the ids of its instruction if it repeats the prompt."""
        policy = policies.make(self.text, **({} if self.text == "full" else {"keep": keep}))
        if not isinstance(policy, policies.KVzip):
            return policy
        ids = np.concatenate([processor.encode(part, begin=False) for part in _REPEAT])
        return dataclasses.replace(policy, instruction=tuple(ids.tolist()))


METHODS = {
    "full": Method("full"),
    "snapkv": Method("snapkv(window=64, kernel=5, pooling='avg')"),
    "pyramidkv": Method(
        # The paper's window. With 64, kvpress falls back to SnapKV's equal budgets at these lengths.
        "pyramidkv(window=8, kernel=5, pooling='avg')",
        "in kvpress the window is part of the falling budgets; ours adds it to each",
    ),
    "streamingllm": Method("streamingllm"),
    "tova": Method("tova(recent=1, evict=False)"),
    "knorm": Method("knorm"),
    "keydiff": Method("keydiff"),
    "adakv": Method(
        "adakv(safeguard=0.0, window=64, kernel=5, pooling='avg')",
        "the kept entries are equal, but kvpress only masks what it evicts",
    ),
    "expectedattention": Method("expectedattention"),
    "criticalkv": Method(
        "criticalkv(window=64, kernel=5, pooling='avg')",
        "in kvpress the window is part of the first half of the budget; ours halves the rest",
    ),
    "observed": Method("roco(recent=0, spread=0.0, evict=False)"),
    "kvzip": Method(
        "kvzip",
        "kvpress only masks what it evicts; without a chat template its press repeats the whole prompt, as ours",
    ),
}
