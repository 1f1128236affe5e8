"""Methods that vlkv and kvpress both have, with equal options. A further method is one more line in `METHODS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.torch_side import WINDOW
from vlkv import policies
from vlkv.policies import Policy
from vlkv.processing import Processor
from vlkv.tools.evaluation.peers import press_of


class Method(NamedTuple):
    """The same method on both sides."""

    policy: Callable[[float], Policy]  # of the share of the entries that is kept
    difference: str = ""  # why the kept entries differ, if they do
    instruction: tuple[str, ...] = ()  # what asks the model to repeat the prompt, in the parts that the press encodes

    def press(self, ratio: float) -> Any:
        """kvpress' press that removes this share of the entries; None for the full cache."""
        return press_of(self.policy(0.5))(ratio)

    def program(self, keep: float, processor: Processor) -> Policy:
        """The policy with the ids of its instruction."""
        policy = self.policy(keep)
        if not self.instruction:
            return policy
        # The base class does not have the field: only policies that repeat the prompt do.
        ids = np.concatenate([processor.encode(part, begin=False) for part in self.instruction])
        return dataclasses.replace(policy, instruction=tuple(ids.tolist()))  # type: ignore[type-var,call-arg]


_AS_KVPRESS: dict[str, Any] = {"window": WINDOW, "kernel": 5, "pooling": "avg"}
METHODS = {
    "full": Method(lambda keep: policies.Full()),
    "snapkv": Method(lambda keep: policies.SnapKV(keep=keep, **_AS_KVPRESS)),
    "pyramidkv": Method(
        # The paper's window. With 64, kvpress falls back to SnapKV's equal budgets at these lengths.
        lambda keep: policies.PyramidKV(keep=keep, **_AS_KVPRESS | {"window": 8}),
        "in kvpress the window is part of the falling budgets; ours adds it to each",
    ),
    "streamingllm": Method(lambda keep: policies.StreamingLLM(keep=keep)),
    "tova": Method(lambda keep: policies.TOVA(keep=keep, recent=1, evict=False)),
    "knorm": Method(lambda keep: policies.Knorm(keep=keep)),
    "keydiff": Method(lambda keep: policies.KeyDiff(keep=keep)),
    "adakv": Method(
        lambda keep: policies.AdaKV(keep=keep, safeguard=0.0, **_AS_KVPRESS),
        "the kept entries are equal, but kvpress only masks what it evicts",
    ),
    "expectedattention": Method(lambda keep: policies.ExpectedAttention(keep=keep)),
    "criticalkv": Method(
        lambda keep: policies.CriticalKV(keep=keep, **_AS_KVPRESS),
        "in kvpress the window is part of the first half of the budget; ours halves the rest",
    ),
    "observed": Method(lambda keep: policies.RoCo(keep=keep, recent=0, spread=0.0, evict=False)),
    "kvzip": Method(
        lambda keep: policies.KVzip(keep=keep),
        "kvpress only masks what it evicts; without a chat template its press repeats the whole prompt, as ours",
        ("\n\nRepeat the previous context exactly.", "\n"),
    ),
}
