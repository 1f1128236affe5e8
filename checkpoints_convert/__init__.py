"""Hugging Face checkpoints: the engine that reads and converts them, given the table of a family. No jax."""
