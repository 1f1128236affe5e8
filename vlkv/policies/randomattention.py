from __future__ import annotations

from vlkv.compression.observe import Observation
from vlkv.compression.option_types import Positive
from vlkv.compression.policy import Facts, Mask
from vlkv.policies.random import Random


class RandomAttention(Random):
    """Keeps the prompt and random tokens of the answer, drawn for every layer and head: a control for long answers.

    The budget is for the prompt and the answer together. Of a prompt that exceeds it, the last tokens are kept, and
    then every token of the answer is evicted. Needs the key= of `generate`.

    Attributes:
        interval: number of new tokens after which entries are selected again.
    """

    interval: Positive = 128
    facts = Facts(observes=False)
    every = property(lambda self: self.interval)

    def protect(self, obs: Observation) -> Mask:
        return obs.valid & ~obs.is_answer
