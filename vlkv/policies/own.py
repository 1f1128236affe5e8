"""A user's own classes: finds them in files and modules, and says in one line where their code fails."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.errors import InputError

_LONGEST = 60  # characters of a path in a message, which has to have room for the error too
_NAMED = re.compile(r"([A-Za-z_][\w -]*)=(.+:[A-Za-z_]\w*)")  # NAME=FILE.py:CLASS
# What to write instead of code that needs the values of arrays, which are not known while a program is compiled. The
# first class that fits is used. jax's own messages are several lines long and describe its types.
_REMEDIES: tuple[tuple[type[Exception], str], ...] = (
    (jax.errors.TracerBoolConversionError, "`if` cannot use an array's values: use jnp.where"),
    (jax.errors.TracerArrayConversionError, "use jax.numpy instead of numpy"),
    (jax.errors.TracerIntegerConversionError, "range() and lists cannot use an array's values: use jnp"),
    (jax.errors.NonConcreteBooleanIndexError, "use jnp.where instead of a mask as index"),
    (jax.errors.ConcretizationTypeError, "float(), int() and sizes cannot use an array's values"),
)


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
    loaded = getattr(module, cls, None)
    if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
        raise InputError(f"{place} has no class {cls!r} that is derived from vlkv.policies.Policy")
    return loaded if shown == cls else _renamed(loaded, shown)


def split_name(name: str) -> tuple[str, str]:
    """The name of an own class in tables, and FILE.py:CLASS or MODULE:CLASS, of which NAME= may be in front."""
    named = _NAMED.fullmatch(name)
    if named is None or Path(name.rpartition(":")[0]).exists():
        return name.rpartition(":")[2], name
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
    renamed: type[Policy] = type(cls)(name, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return renamed


def classes(policy: Policy) -> set[type[Policy]]:
    """The user's own classes in a policy and in its parts."""
    return {type(owner) for owner in slots_of(policy).owners if _is_own(type(owner))}


def _is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] != "vlkv"


@contextlib.contextmanager
def errors(*used: type[Policy], checks: bool = False) -> Iterator[None]:
    """If own classes are used, whatever fails within the context becomes one line with the file and the line.

    Args:
        used: the classes.
        checks: whether this also applies to an `InputError`, which a check of what a method has returned raises.

    Raises:
        InputError: in the place of any other error.
    """
    try:
        yield
    except Exception as error:
        classes = [cls for cls in used if _is_own(cls)]
        if not classes or (isinstance(error, InputError) and not checks):
            raise
        named = [cls for cls in classes if cls.__name__ in str(error)] or classes
        line = _definition(named[0], str(error))
        raise InputError(
            _located(error, *(cls.__module__ for cls in classes), otherwise=(named[0].__module__, line))
        ) from None


def _definition(cls: type[Policy], said: str) -> int | None:
    """The line of the method that a message names, or else of the class."""
    classes = [each for each in cls.__mro__ if each.__module__ == cls.__module__]
    methods = [x for each in classes for name, x in vars(each).items()
               if inspect.isfunction(x) and re.search(rf"\b{name}\b", said)]  # fmt: skip
    source: Any
    for source in (*methods, *classes):
        with contextlib.suppress(OSError):  # a class that was given another name is in no file
            return inspect.getsourcelines(source)[1]
    return None


def _located(error: Exception, *places: str, otherwise: tuple[str, int | None] | None = None) -> str:
    """An error in one line, with the last line of the user's files that led to it.

    Args:
        error: whatever the user's code has raised.
        places: the user's files or modules.
        otherwise: place and line if the error did not come from there.
    """
    modules = {place: getattr(sys.modules.get(place), "__file__", None) or place for place in places}
    files = {os.path.abspath(file): place for place, file in modules.items()}
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines.append((error.filename or "", error.lineno))
    places_in_files = [
        (files[os.path.abspath(file)], number) for file, number in lines if os.path.abspath(file) in files
    ]
    place, number = places_in_files[-1] if places_in_files else otherwise or (places[0], None)
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    remedy = next((text for known, text in _REMEDIES if isinstance(error, known)), None)
    said = remedy or " ".join(str(error).strip().partition("\n\n")[0].split())
    shown = place if len(place) <= _LONGEST else f".../{os.path.basename(place)}"
    where = shown if number is None else f"{shown}, line {number}"
    return f"{where}: {kind}{said}".removesuffix(": ")
