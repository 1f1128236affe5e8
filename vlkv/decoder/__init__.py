"""The decoder of all families, and the small modules that decoders and towers share."""

from vlkv.decoder.decoder import Attend, Decoder, add_features, attend_to_prompt

__all__ = ["Attend", "Decoder", "add_features", "attend_to_prompt"]
