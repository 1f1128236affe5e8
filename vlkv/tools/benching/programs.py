"""Compiles prefill and decoding; reports compile time and the memory that the compiler plans."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from vlkv.cache.pool import PackedCache
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.decode import decode
from vlkv.generation.prefill import prefill
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.policies import Policy, text_of

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


def compile_pair(params: Model, inputs: Inputs, policy: Policy, *, new: int) -> Pair:
    """Prefill and `new` decoding steps; `params` may be shapes."""
    sizes = []

    def read(params: Model, inputs: Inputs, seed: Array) -> tuple[PackedCache, Array]:
        key = jax.random.key(seed)
        cache, logits = prefill(params, inputs, policy, new_tokens=new, key=key)
        sizes.append(cache.bytes)
        return cache, logits

    program, leaves, tree = _compile(read, *jax.tree.flatten((params, inputs, SEED)))
    weights, weights_tree = jax.tree.flatten(params)
    joined = jax.tree_util.treedef_tuple((weights_tree, *tree.children()))
    steps, *_ = _compile(partial(decode, sampling=endless(new)), [*weights, *leaves], joined)
    return Pair(program, steps, sizes[0])


def _compile(function: Callable[..., Any], leaves: list[Any], tree: Any) -> tuple[Program, list[Any], Any]:
    """The program, the shapes of its results with shardings, and their tree structure.

    Trees are flattened here and not by jit, which would put descriptions of arrays in fields of our classes.
    """
    trees = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        results, result_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        trees.append(result_tree)
        return tuple(results)

    traced, compiled, times = _timed(jax.jit(flat), *leaves)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
        for x, placed in zip(traced.out_info, compiled.output_shardings, strict=True)
    ]

    def run(*arguments: Any) -> Any:
        return jax.tree.unflatten(trees[0], compiled(*jax.tree.leaves(arguments)))

    plan, size = compiled.memory_analysis(), 0
    if plan is not None:  # not every backend reports it
        shared = plan.alias_size_in_bytes
        size = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes - shared
    return Program(run, times["trace"], times["compile"], size), shapes, trees[0]


def _timed(function: Any, *arguments: Any, **options: Any) -> tuple[Any, Any, dict[str, float]]:
    """Traces and compiles a jitted function; the seconds of both, and the processor time of the compiler's threads."""
    begin = time.perf_counter()
    traced = function.trace(*arguments, **options)
    lowered = traced.lower()
    middle, processor = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    used, end = time.process_time() - processor, time.perf_counter()
    return traced, compiled, {"trace": middle - begin, "compile": end - middle, "processor": used}


def evaluation(shapes: Model, inputs: Inputs, contestants: Sequence[Policy], *, new: int) -> list[dict[str, Any]]:
    """Compiles the programs of `vlkv eval` one after another, and returns their times.

    One reads prompts, two belong to each method.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    rows: list[dict[str, Any]] = []

    def compiled(name: str, function: Any, *arguments: Any, **options: Any) -> Any:
        traced, _, times = _timed(function, *arguments, **options)
        rows.append({"program": name} | {f"{key}_seconds": round(value, 2) for key, value in times.items()})
        return traced.out_info

    observers = tuple(contestants)
    prompt = compiled("read the prompt", jitted.read_prompt, shapes, inputs, observers=observers, new_tokens=new)
    key, sampling = jax.random.key(0), Greedy(max_new_tokens=new)
    for policy in contestants:
        name, fill = text_of(policy), jitted.fill_cache_with
        cache = compiled(f"fill, {name}", fill, prompt, policy, None, new_tokens=new, key=key)
        compiled(f"decode, {name}", jitted.decode, shapes, cache, prompt.logits, sampling=sampling)
    return rows
