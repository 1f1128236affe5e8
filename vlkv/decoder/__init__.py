"""The decoder of all families, and the small modules that decoders and towers share."""

from vlkv.decoder.decoder import Attend, Decoder, attend_to_prompt

__all__ = ["Attend", "Decoder", "attend_to_prompt"]
