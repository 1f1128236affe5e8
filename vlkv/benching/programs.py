"""Prefill and decoding as compiled programs: what compiling takes, what the compiler says they need, cache hits."""

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
from vlkv.cache import PackedCache
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generate import decode, generate
from vlkv.inputs import Inputs
from vlkv.policies import Policy
from vlkv.prefill import prefill
from vlkv.sampling import Greedy

SEED = np.uint32(0)  # of random policies; a number and no key, so that every process of a pod may hand it in


class Program(NamedTuple):
    """A compiled function of arrays alone."""

    run: Callable[..., Any]
    trace_seconds: float
    compile_seconds: float
    bytes: int  # arguments, results and temporaries, as the compiler has laid them out; weights are arguments


class Pair(NamedTuple):
    """Both halves of a job."""

    prefill: Program  # (params, inputs, SEED) -> cache, logits
    decode: Program  # (params, cache, logits) -> tokens, lengths
    cache_bytes: int

    @property
    def first_call_seconds(self) -> float:
        """What the first call costs above the second."""
        return sum(p.trace_seconds + p.compile_seconds for p in (self.prefill, self.decode))

    @property
    def bytes(self) -> int:
        """Of the hungrier half."""
        return max(self.prefill.bytes, self.decode.bytes)


def endless(new: int) -> Greedy:
    """Always so many tokens: random weights may say the end at once."""
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
    """The whole job in one program, as `jax.jit(vlkv.generate)` makes it; `params` may be shapes."""

    def whole(params: Model, inputs: Inputs, seed: Array) -> Any:
        key = jax.random.key(seed)
        return generate(params, inputs, policy=policy, sampling=endless(new), key=key, kernels=kernels)

    return _compile(whole, *jax.tree.flatten((params, inputs, SEED)))[0]


def _compile(function: Callable[..., Any], leaves: list[Any], tree: Any) -> tuple[Program, list[Any], Any]:
    """The program, the shapes of what it returns with their places on a mesh, and its tree.

    Trees are taken apart here and not by jit, which would put descriptions of arrays in our classes' fields.
    """
    trees = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        made, made_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        trees.append(made_tree)
        return tuple(made)

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
    """What the compiler has laid out for one run; 0 where the backend does not say."""
    plan = compiled.memory_analysis()
    if plan is None:
        return 0
    shared = plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes - shared


class Hits:
    """Counts what the persistent compilation cache gave and did not give, from now on."""

    def __init__(self) -> None:
        self.hits, self.misses = 0, 0
        jax.monitoring.register_event_listener(self._listen)

    def _listen(self, event: str, **_: Any) -> None:
        self.hits += event == "/jax/compilation_cache/cache_hits"
        self.misses += event == "/jax/compilation_cache/cache_misses"


def keep_programs(folder: Path) -> Hits:
    """Turns the persistent compilation cache on, for programs of any size.

    Raises:
        InputError: no folder can be made there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--compilation-cache {folder}: no folder can be made there ({error.strerror})") from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Hits()
