"""The decoder that every family shares, and the small modules that towers are built from too."""

from vlkv.decoder.decoder import Decoder

__all__ = ["Decoder"]
