"""KIVI: nothing is evicted, every number gets smaller."""

from __future__ import annotations

from vlkv.policies.full import Full
from vlkv.policies.policy import Storage, policy


@policy
class KIVI(Full):
    """All prompt entries, quantised once: keys per channel, values per token (Liu et al. 2024, Sec. 3).

    A group of numbers shares a minimum and a scale, in the precision of the pool; codes are packed into bytes. Groups
    of keys run along the slots of one layer and head, groups of values along the channels. Generated tokens stay as
    they come: they are the paper's recent window in full precision, and are not quantised later on.
    `policies.compose(other, store=KIVI(bits=2))` stores in this way what another method keeps.

    Attributes:
        bits: 2 or 4 as published, or 8.
        group: numbers that share a minimum and a scale.
    """

    bits: int = 2
    group: int = 32
    paper = "Liu et al. 2024, KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"
    equations = "Sec. 3, Alg. 1"
    stages = "store"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("bits", self.bits in (2, 4, 8), "must be 2, 4 or 8")
        self.check("group", self.group >= 1, "must be at least 1")

    @property
    def storage(self) -> Storage:
        """Bits and group."""
        return Storage(self.bits, self.group)
