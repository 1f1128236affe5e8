"""The decoder of all families, and the small modules that decoders and towers share."""

from vlkv.decoder.decoder import Decoder, attend_to_prompt

__all__ = ["Decoder", "attend_to_prompt"]
