"""From a prompt to tokens: prefill, decoding, and further turns."""
