"""Refusing what is not honoured: one error that names the field."""

from __future__ import annotations

from vlkv.errors import InputError


def require(field: str, value: object, supported: object) -> None:
    """Raises InputError unless a field of `config.json` has the one value that we honour."""
    if value != supported:
        raise InputError(f"config.json: {field}={value!r} is not supported (only {supported!r})")


def positive(field: str, value: object) -> int:
    """The value, a whole number of at least 1; InputError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: {field}={value!r} must be a whole number of at least 1")
    return value
