"""What a cache that is selected again knows of its entries besides keys and values; see `reselection.py`.

Axes: as in `pool.py`; E entries of a segment, up to a static bound · N query heads · W newest queries · M numbers of a
place.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int, UInt32

from vlkv.config import RopeConfig
from vlkv.inputs import Bounds
from vlkv.sharding.placement import axes

PLACES = ("rotation", "grid")  # names of places in `Stages.uses`; the grid's are those of `Inputs.grid`
UNLIMITED = 2**30  # the capacity of a cache that does not grow

_ENTRIES = axes(None, "batch", "kv_heads", "entries")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Reselection:
    """What is known of the entries of a cache besides keys and values.

    The number of a token is its index in the padded prompt, which new tokens follow.
    """

    is_vision: Bool[Array, "L B K E"] = field(metadata=_ENTRIES)  # of the entries of each segment, in order
    tail_is_vision: Bool[Array, "B S"] = field(metadata=axes("batch", "entries"))
    before: Int[Array, " B"] = field(metadata=axes("batch"))  # number of the first token of the tail
    total: Int[Array, " B"] = field(metadata=axes("batch"))  # entries that all layers keep together, per key head
    rounds: Int[Array, " B"] = field(metadata=axes("batch"))  # how often the cache has been selected again
    key: UInt32[Array, "B words"] | None = field(default=None, metadata=axes("batch"))  # of random methods
    # Only for methods that use places: positions of the rotation, or places on the grid, or both, as `places` says.
    place: Int[Array, "L B K E M"] | None = field(default=None, metadata=_ENTRIES)
    tail_place: Int[Array, "B S M"] | None = field(default=None, metadata=axes("batch", "entries"))
    # Queries of the newest tokens of the tail; entry i is at i % W. None: the method observes none.
    q: Float[Array, "B N L W H"] | None = field(default=None, metadata=axes("batch", "heads", None, "entries"))
    policy: Any = field(metadata={"static": True})
    bounds: Bounds = field(metadata={"static": True})  # of the prompt
    prompt: int = field(metadata={"static": True})  # length of the padded prompt: the number of the first new token
    rope: RopeConfig | None = field(default=None, metadata={"static": True})
    places: tuple[str, ...] = field(default=(), metadata={"static": True})  # of PLACES, in this order

    @property
    def tail(self) -> int:
        """Number of tail slots S."""
        return self.tail_is_vision.shape[1]

    def split(self, place: Int[Array, "*shape M"] | None) -> dict[str, Int[Array, "*shape _"]]:
        """The places of entries by name."""
        if place is None:
            return {}
        ends = {"rotation": place[..., : place.shape[-1] - 3 * ("grid" in self.places)], "grid": place[..., -3:]}
        return {name: ends[name] for name in self.places}
