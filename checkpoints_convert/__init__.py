"""Reads and converts Hugging Face checkpoints, given the `Table` of a model. Does not import jax."""
