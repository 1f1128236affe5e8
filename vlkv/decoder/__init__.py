"""The decoder of all families, and the small modules that decoders and towers share."""

from vlkv.decoder.decoder import Attend, Decoder, Recurring, attend_to_prompt, recur_over_prompt

__all__ = ["Attend", "Decoder", "Recurring", "attend_to_prompt", "recur_over_prompt"]
