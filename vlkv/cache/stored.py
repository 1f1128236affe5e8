"""Which prompt tokens a cache stores, as a small copy of its tables that outlives the cache.

Axes: as in `pool.py`; here T is the length of the padded prompt.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from vlkv.cache.parts import slot_of
from vlkv.cache.pool import PackedCache
from vlkv.errors import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTokens:
    """The entries of a `PackedCache` before decoding; `token`, `start` and `parts` are its fields."""

    token: Int[Array, "B #K P"]
    start: Int[Array, "L B K"]
    counts: Int[Array, "L B K"]
    parts: int = field(metadata={"static": True})
    prompt: int = field(metadata={"static": True})  # T

    @classmethod
    def of(cls, cache: PackedCache, prompt: int) -> StoredTokens:
        """The entries of a cache of `prompt` tokens with which no token has been decoded."""
        return cls(token=cache.token, start=cache.start, counts=cache.counts, parts=cache.parts, prompt=prompt)

    def mask(self) -> Bool[np.ndarray, "L B K T"]:
        """The tokens as a mask on the host.

        Raises:
            InputError: the arrays are not on this host.
        """
        arrays = self.token, self.start, self.counts
        if any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in arrays):
            raise InputError(
                "`kept` is made on the host: read it outside jit, on several hosts from vlkv.sharding.gather(output)"
            )
        token, start, counts = map(np.asarray, arrays)
        _, columns, slots = token.shape
        layer, row, head, number = np.nonzero(np.arange(self.prompt) < counts[..., None])
        slot = slot_of(number, start[layer, row, head], slots, self.parts)
        mask = np.zeros((*start.shape, self.prompt), bool)
        mask[layer, row, head, token[row, head % columns, slot]] = True
        return mask
