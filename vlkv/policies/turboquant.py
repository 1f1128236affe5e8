from __future__ import annotations

from vlkv.cache.pool import Storage
from vlkv.compression.policy import Facts
from vlkv.policies.full import Full


class TurboQuant(Full):
    """All prompt entries, each key and value vector quantised by itself (Zandieh et al. 2025, Alg. 1).

    After a random rotation the channels of any vector are nearly independent and Gaussian, so one fixed codebook serves
    all of them. A vector needs its codes and its norm. `compose(other, store=TurboQuant(bits=3))` stores what another
    method keeps. The paper's second quantiser, with an unbiased inner product, is not implemented.

    Attributes:
        bits: 2, 3 or 4.
        tail: whether generated tokens are quantised too, as soon as they are written.
    """

    bits: int = 4
    tail: bool = False
    facts = Facts(stages="store")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("bits", self.bits in (2, 3, 4), "must be 2, 3 or 4")

    @property
    def storage(self) -> Storage:
        return Storage(self.bits, None, tail=self.tail)
