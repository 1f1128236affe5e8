"""Hugging Face checkpoints: tables of names, reading, and a streaming converter."""
