"""Compiles prefill and decoding; reports compile time, the memory that the compiler plans, and cache hits."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from pallas_kernels import Kernels
from vlkv.cache.pool import PackedCache
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.decode import decode
from vlkv.generation.generate import generate
from vlkv.generation.prefill import prefill
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.policies import Policy

SEED = np.uint32(0)  # for random policies; a number, because every process of a pod can pass it, unlike a key


class Program(NamedTuple):
    """A compiled function of arrays."""

    run: Callable[..., Any]
    trace_seconds: float
    compile_seconds: float
    bytes: int  # of arguments (including weights), results and temporaries, as planned by the compiler


class Pair(NamedTuple):
    """Prefill and decoding."""

    prefill: Program  # (params, inputs, SEED) -> cache, logits
    decode: Program  # (params, cache, logits) -> tokens, lengths
    cache_bytes: int

    @property
    def first_call_seconds(self) -> float:
        """Time of tracing and compiling."""
        return sum(p.trace_seconds + p.compile_seconds for p in (self.prefill, self.decode))

    @property
    def bytes(self) -> int:
        """The larger memory of the two."""
        return max(self.prefill.bytes, self.decode.bytes)


def endless(new: int) -> Greedy:
    """Greedy decoding of exactly `new` tokens, because random weights may generate the stop token at once."""
    return Greedy(max_new_tokens=new, stop=())


def compile_pair(params: Model, inputs: Inputs, policy: Policy, *, new: int, kernels: Kernels | None = None) -> Pair:
    """Prefill and `new` decoding steps; `params` may be shapes."""
    sizes = []

    def read(params: Model, inputs: Inputs, seed: Array) -> tuple[PackedCache, Array]:
        key = jax.random.key(seed)
        cache, logits = prefill(params, inputs, policy, new_tokens=new, key=key, kernels=kernels)
        sizes.append(cache.bytes)
        return cache, logits

    made, leaves, tree = _compile(read, *jax.tree.flatten((params, inputs, SEED)))
    all_leaves, whole = jax.tree.flatten(params)
    joined = jax.tree_util.treedef_tuple((whole, *tree.children()))
    steps, *_ = _compile(partial(decode, sampling=endless(new)), [*all_leaves, *leaves], joined)
    return Pair(made, steps, sizes[0])


def compile_generate(
    params: Model, inputs: Inputs, policy: Policy, *, new: int, kernels: Kernels | None = None
) -> Program:
    """`jax.jit(vlkv.generate)` as one program; `params` may be shapes."""

    def whole(params: Model, inputs: Inputs, seed: Array) -> Any:
        key = jax.random.key(seed)
        return generate(params, inputs, policy=policy, sampling=endless(new), key=key, kernels=kernels)

    return _compile(whole, *jax.tree.flatten((params, inputs, SEED)))[0]


def _compile(function: Callable[..., Any], leaves: list[Any], tree: Any) -> tuple[Program, list[Any], Any]:
    """The program, the shapes of its results with shardings, and their tree structure.

    Trees are flattened here and not by jit, which would put descriptions of arrays in fields of our classes.
    """
    trees = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        results, result_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        trees.append(result_tree)
        return tuple(results)

    begin = time.perf_counter()
    traced = jax.jit(flat).trace(*leaves)
    lowered = traced.lower()
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
        for x, placed in zip(traced.out_info, compiled.output_shardings, strict=True)
    ]

    def run(*arguments: Any) -> Any:
        return jax.tree.unflatten(trees[0], compiled(*jax.tree.leaves(arguments)))

    return Program(run, middle - begin, end - middle, planned_bytes(compiled)), shapes, trees[0]


def planned_bytes(compiled: Any) -> int:
    """Bytes that the compiler plans for one run; 0 if the backend does not report them."""
    plan = compiled.memory_analysis()
    if plan is None:
        return 0
    shared = plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes - shared


class Hits:
    """Counts hits and misses of the persistent compilation cache from now on."""

    def __init__(self) -> None:
        self.hits, self.misses = 0, 0
        jax.monitoring.register_event_listener(self._listen)

    def _listen(self, event: str, **_: Any) -> None:
        self.hits += event == "/jax/compilation_cache/cache_hits"
        self.misses += event == "/jax/compilation_cache/cache_misses"


def keep_programs(folder: Path) -> Hits:
    """Turns on the persistent compilation cache, for programs of any size.

    Raises:
        InputError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--compilation-cache {folder}: cannot be created ({error.strerror})") from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Hits()
