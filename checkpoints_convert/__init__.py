"""Reads and converts Hugging Face checkpoints, given the table of a family. Does not import jax."""
