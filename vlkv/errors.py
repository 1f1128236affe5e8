"""The error for bad input. Its message names what is wrong and how to correct it."""

from __future__ import annotations


class InputError(ValueError):
    """An input of the caller cannot be used. The message is one line."""
