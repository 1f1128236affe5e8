"""A user's own classes: finds them in files and modules, and says in one line where their code fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from vlkv.compression.policy import Policy
from vlkv.errors import InputError

_NAMED = re.compile(r"([A-Za-z_][\w -]*)=(.+:[A-Za-z_]\w*)")  # NAME=FILE.py:CLASS


def load(name: str) -> type[Policy]:
    """The class FILE.py:CLASS or MODULE:CLASS, whose code is executed. With NAME= in front, it gets that name.

    Raises:
        InputError: the file cannot be executed, and the message names the line; or it has no such class of a policy.
    """
    shown, path = split_name(name)
    place, _, cls = path.rpartition(":")
    try:
        module = _load(place) if place.endswith(".py") else importlib.import_module(place)
    except OSError:
        raise InputError(f"policy {name!r}: {place}: no such file") from None
    except Exception as error:  # whatever the user's code raises
        raise InputError(_located(error, place)) from None
    found = getattr(module, cls, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise InputError(f"{place} has no class {cls!r} that is derived from vlkv.policies.Policy")
    return found if shown == cls else _renamed(found, shown)


def split_name(own: str) -> tuple[str, str]:
    """The name of an own class in tables, and FILE.py:CLASS or MODULE:CLASS, of which NAME= may be in front."""
    named = _NAMED.fullmatch(own)
    if named is None or Path(own.rpartition(":")[0]).exists():
        return own.rpartition(":")[2], own
    return named[1], named[2]


@functools.cache  # so that the class is the same in every call
def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file, file)  # the module's name is the file, as in FILE.py:CLASS
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


@functools.cache
def _renamed(cls: type[Policy], name: str) -> type[Policy]:
    made: type[Policy] = type(cls)(name, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return made


def classes(policy: Policy) -> set[type[Policy]]:
    """The user's own classes in a policy and in its parts."""
    return {type(part) for part in _parts(policy) if _is_own(type(part))}


def _is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] != "vlkv"


def _parts(value: Any) -> Iterator[Policy]:
    """A policy and the policies in its fields."""
    if isinstance(value, Policy):
        yield value
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))


@contextlib.contextmanager
def errors(*used: type[Policy]) -> Iterator[None]:
    """If own classes are used, whatever fails within the context becomes one line with the file and the line.

    Raises:
        InputError: in the place of any other error.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        places = [cls.__module__ for cls in used if _is_own(cls)]
        if not places:
            raise
        raise InputError(_located(error, *places)) from None


def _located(error: Exception, *places: str) -> str:
    """An error in one line, with the last line of the user's files that led to it. `places` are files or modules."""
    modules = {place: getattr(sys.modules.get(place), "__file__", None) or place for place in places}
    files = {os.path.abspath(file): place for place, file in modules.items()}
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines.append((error.filename or "", error.lineno))
    found = [(files[os.path.abspath(file)], number) for file, number in lines if os.path.abspath(file) in files]
    where = f"{found[-1][0]}, line {found[-1][1]}" if found else " and ".join(places)
    said = " ".join(str(error).strip().partition("\n\n")[0].split())
    return f"{where}: {type(error).__name__}: {said}".removesuffix(": ")
