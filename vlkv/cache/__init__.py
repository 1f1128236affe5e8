"""The compressed cache: one packed pool, tails, decode states, and the code that fills and reads them."""

from vlkv.cache.pool import PackedCache, entries, take_rows
from vlkv.cache.resizing import resize

__all__ = ["PackedCache", "entries", "resize", "take_rows"]
