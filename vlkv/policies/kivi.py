from __future__ import annotations

from vlkv.cache.pool import Storage
from vlkv.compression.option_types import Positive
from vlkv.compression.policy import Facts
from vlkv.policies.full import Full


class KIVI(Full):
    """All prompt entries, quantised once: keys per channel, values per token (Liu et al. 2024, Sec. 3).

    A group of numbers shares a minimum and a scale, in the precision of the pool. Groups of keys run along the slots of
    one layer and head, groups of values along the channels. `compose(other, store=KIVI(bits=2))` stores what another
    method keeps.

    Attributes:
        bits: 2 or 4 as published, or 8.
        group: numbers that share a minimum and a scale.
        window: R, how many of the latest generated tokens are in full precision, a multiple of `group`; the paper uses
            128. Attention gets older ones quantised (Alg. 1), but the tail takes as much memory. None: all of them.
    """

    bits: int = 2
    group: Positive = 32
    window: Positive | None = None
    facts = Facts(stages="store")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("bits", self.bits in (2, 4, 8), "must be 2, 4 or 8")
        fits = self.window is None or self.window % self.group == 0
        self.check("window", fits, f"must be a multiple of group={self.group}, or None")

    @property
    def storage(self) -> Storage:
        return Storage(self.bits, self.group, self.window)
