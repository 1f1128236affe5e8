"""Reads the decoders of all families from a `config.json`: those of transformers that are supported."""
