"""The one error for bad input: it names the thing that is wrong and says what to do about it."""

from __future__ import annotations


class InputError(ValueError):
    """Something the caller handed us cannot be used; the message is one line, fit for a terminal."""
