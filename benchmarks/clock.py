"""Times kernels that take microseconds: many calls in one program, on data that is larger than the caches.

Timing one call from the host would measure its dispatch, 50 to 100 microseconds on a GPU, and a second call would find
its data in the L2 cache. So a call is repeated in one jitted loop. The number of iterations is static, so the device
does not wait for the host between them; each iteration reads another segment of a pool of gigabytes; and its result is
part of the next one's input, so that the compiler cannot remove it.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WANTED_SECONDS = 0.03  # time of one program: hundreds of times its dispatch
MOST_CALLS = 4096


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one call."""

    seconds: float  # the median over the repeats
    spread: float  # (largest - smallest) / median
    calls: int  # per program
    compile_seconds: float

    def row(self) -> dict[str, float]:
        times = {"microseconds": round(1e6 * self.seconds, 2), "spread": round(self.spread, 3), "calls": self.calls}
        return {**times, "compile_seconds": round(self.compile_seconds, 2)}


def calls_for(estimate: float) -> int:
    """Number of calls per program, if one call takes about `estimate` seconds."""
    return max(1, min(MOST_CALLS, round(WANTED_SECONDS / max(estimate, 1e-7))))


@dataclasses.dataclass(frozen=True)
class Program:
    """Many calls in one compiled program."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    calls: int
    compile_seconds: float

    def seconds(self) -> float:
        """Seconds per call in one run of the program."""
        jax.block_until_ready(self.arguments)
        begin = time.perf_counter()
        jax.block_until_ready(self.run(*self.arguments))
        return (time.perf_counter() - begin) / self.calls

    def time(self, repeats: int = 5) -> Timing:
        """The median of `repeats` runs, after one run to warm up."""
        times = [self.seconds() for _ in range(repeats + 1)][1:]
        median = float(np.median(times))
        return Timing(median, (max(times) - min(times)) / median, self.calls, self.compile_seconds)


def chain(step: Callable[..., Any], first: Any, *fixed: Any, calls: int) -> Program:
    """Compiles `carry = step(carry, turn, *fixed)`, called `calls` times; `turn` is the number of the iteration.

    The result of a step must have the shapes and dtypes of its first argument and depend on all timed work.
    """

    def program(first: Any, *fixed: Any) -> Any:
        return jax.lax.scan(lambda carry, turn: (step(carry, turn, *fixed), None), first, jnp.arange(calls))[0]

    begin = time.perf_counter()
    compiled = jax.jit(program).lower(first, *fixed).compile()
    return Program(compiled, (first, *fixed), calls, time.perf_counter() - begin)


def repeated(
    function: Callable[..., Any], q: Any, *others: Any, moved: int, estimate: float = 0.0, spread_bytes: int = 2**28
) -> Program:
    """Compiles many calls of function(q, *others), each with another copy of `others`, so that no cache holds them.

    The function returns an array or a tuple of arrays; the first of them becomes part of the next call's q. `moved` are
    the least bytes that a call must read or write, `estimate` the seconds of a call if computing takes longer than
    that, and `spread_bytes` the least bytes of all copies together.
    """
    copies = max(1, min(16, -(-spread_bytes // max(moved, 1))))
    sets = [tuple(jnp.copy(x) for x in others) for _ in range(copies)] if copies > 1 else [others]

    def step(q: Any, _: Any, *sets: Any) -> Any:
        for copy in sets:
            result = jax.tree.leaves(function(q, *copy))[0]
            # The product is too small to change q, but a compiler cannot know that.
            if result.size == q.size:
                q = result.astype(q.dtype).reshape(q.shape)
            else:
                q = q + 1e-30 * jnp.sum(result).astype(q.dtype)
        return q

    estimate = max(estimate, moved / (2e10 if jax.default_backend() == "cpu" else 1e12) + 5e-6)
    turns = max(1, calls_for(estimate) // copies)
    return dataclasses.replace(chain(step, q, *sets, calls=turns), calls=turns * copies)


# --- limits of the device -----------------------------------------------------------------------------------------


def copy_bandwidth(size: int, calls: int | None = None) -> tuple[float, Timing]:
    """Bytes per second (read plus written) of changing an array of `size` bytes in place."""
    x = jnp.ones(size // 4, jnp.float32)
    calls = calls or 4 * calls_for(2 * size / 3e12)  # many, because a program begins with one more copy
    timing = chain(lambda x, _: -x, x, calls=calls).time()
    return 2 * size / timing.seconds, timing


def read_bandwidth(size: int, calls: int | None = None) -> tuple[float, Timing]:
    """Bytes per second of summing an array of `size` bytes."""
    x = jnp.ones((8, size // 32), jnp.float32)

    def step(total: Any, _: Any, x: Any) -> Any:  # depends on the carry, so that it is computed in each iteration
        return jnp.sum(jnp.where(x > total, x, 0.5 * x)) * 1e-12

    timing = chain(step, jnp.zeros(()), x, calls=calls or calls_for(size / 3e12)).time()
    return x.nbytes / timing.seconds, timing


def product_rate(size: int, calls: int | None = None) -> tuple[float, Timing]:
    """Operations per second of products of square bfloat16 matrices with `size` rows."""
    w = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / size**0.5
    timing = chain(lambda x, _, w: x @ w, w, w, calls=calls or calls_for(2 * size**3 / 8e14)).time()
    return 2 * size**3 / timing.seconds, timing
