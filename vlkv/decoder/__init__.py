"""The decoder of all families, and the small modules that decoders and towers share."""

from vlkv.decoder.decoder import Decoder

__all__ = ["Decoder"]
