"""Compiles several programs at a time: XLA's compiler for a CPU uses little more than one core for a program."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from vlkv.families import Model

# Programs that are compiled at a time: few, because each needs memory, and on a CPU memory maps, which `make_room`
# counts only when the next program is traced.
AT_A_TIME = min(4, os.cpu_count() or 1)

Call = Callable[..., Any]  # calls its first argument, a jitted function, with the others


def call(function: Any, *arguments: Any, **options: Any) -> Any:
    """Calls a function."""
    return function(*arguments, **options)


@contextlib.contextmanager
def compiling(params: Model, known: dict[Any, Any]) -> Iterator[Call]:
    """Yields a `Call` that compiles instead of computing, and returns the shapes of the results.

    When the context ends, all programs are compiled, and jax uses them where the functions are called with arrays of
    the same shapes. There an error of the compiler is raised, and not here.

    Args:
        params: the model, on one device, from whose arrays all others are computed.
        known: the shapes of the results of programs that are compiled already; new ones are added.
    """
    leaf = jax.tree.leaves(params)[0]
    placed = leaf.sharding if leaf.committed else None  # results of jit are committed if an argument is
    running: set[Future[Any]] = set()

    def compile(function: Any, *arguments: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((arguments, options))
        key = function, structure, tuple(getattr(x, "shape", x) for x in leaves)
        if key not in known:
            if len(running) == AT_A_TIME:
                running.difference_update(wait(running, return_when=FIRST_COMPLETED).done)
            traced = function.trace(*arguments, **options)
            running.add(threads.submit(traced.lower().compile))
            known[key] = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed, weak_type=x.weak_type),
                traced.out_info,
            )
        return known[key]

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        yield compile
