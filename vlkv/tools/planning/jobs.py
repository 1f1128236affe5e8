"""Compiles the programs of one policy and summarises them."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vlkv import sharding
from vlkv.analysis import cost
from vlkv.compression.slots import slots_of
from vlkv.generation.decode import decode_step
from vlkv.generation.generate import generate
from vlkv.generation.prefill import prefill
from vlkv.generation.sampling import Greedy
from vlkv.policies import Policy
from vlkv.tools.planning import arithmetic
from vlkv.tools.planning.arithmetic import Estimate, Job, by_shapes, estimate
from vlkv.tools.planning.chips import Topology
from vlkv.tools.planning.programs import DoesNotFit, Program, compile_program

SLOWER = {"bfloat16": 1.0, "float32": 6.0}  # a float32 product is six bfloat16 products; GPUs' TF32 is not used


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Prefill, one decode step, or `generate`."""

    program: Program | None  # None if it was refused, or if no compiler for the chip is available
    needed: int | None  # bytes, if the compiler refused it because a chip has less memory; 0: not reported
    argument_bytes: int  # of its arguments on one chip, computed from shapes, including tile padding
    seconds: float  # of compiling, including tracing and lowering
    estimate: Estimate | None = None  # of its time; None if it was refused

    @property
    def refused(self) -> bool:
        """Whether the compiler refused it, because it needs more memory than a chip has."""
        return self.needed is not None

    @property
    def compiled(self) -> bool:
        """Whether a compiler was called."""
        return self.refused or self.program is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The job with one policy. Bytes are those of one chip, including tile padding."""

    policy: Policy
    batch: int
    weights: int
    pool: int  # keys and values of the prompt
    tail: int  # keys and values of new tokens
    rings: int  # keys and values of layers with a sliding window
    states: int  # of recurrent layers
    index: int  # arrays of the cache that describe where entries are
    inputs: int
    temporaries: int | None  # the most in any program; None if one was refused or if there is no compiler
    used: int  # the most that is needed at once
    fits: bool | None  # whether a chip has this memory; None: it has, but temporaries are unknown and may need more
    remedies: tuple[str, ...]  # changes that would fit, if it does not
    prefill: Step
    decode: Step
    generate: Step | None = None  # prefill and all steps in one program, if requested

    @property
    def refused(self) -> bool:
        """Whether the compiler refused any program."""
        return any(step is not None and step.refused for step in (self.prefill, self.decode, self.generate))

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed of all rows together."""
        return None if self.decode.estimate is None else self.batch / self.decode.estimate.seconds


def run(job: Job, where: Topology, mesh: Any, params: Any, say: Callable[[str], None], *, whole: bool) -> Run:
    """Compiles prefill, and a decode step on the cache that prefill returns; with `whole`, `generate` too.

    If `mesh` is abstract, no compiler is available, and only shapes are computed.
    """
    inputs = sharding.place_inputs(job.question.inputs, mesh)
    token = sharding.place_inputs(jax.ShapeDtypeStruct((job.batch,), np.int32), mesh)
    key = jax.eval_shape(lambda: jax.random.key(0))
    replicated = NamedSharding(mesh, PartitionSpec())
    draws = slots_of(job.policy).needs_key
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated) if draws else None

    def compiled(what: str, function: Any, *arguments: Any, **options: Any) -> tuple[Step, Any]:
        """The step, and the shapes of its results, with shardings if a compiler has chosen them."""
        exists = isinstance(mesh, Mesh)
        say(f"{'compiling' if exists else 'computing the shapes of'} {type(job.policy).__name__}: {what}")
        begin, program, needed = time.perf_counter(), None, None
        try:
            if exists:
                program, out = compile_program(function, *arguments, **options)
            else:
                out = jax.eval_shape(function, *arguments, **options)
        except DoesNotFit as error:
            out, needed = error.out, error.needed
        size = cost.chip_bytes(arguments, where.chip.platform)
        return Step(program=program, needed=needed, argument_bytes=size, seconds=time.perf_counter() - begin), out

    # keep_unused, because inputs take memory on the chip even if a program does not use them.
    read = jax.jit(prefill, static_argnames="new_tokens", keep_unused=True)
    step = jax.jit(decode_step, donate_argnames="cache", keep_unused=True)
    answer = jax.jit(generate, keep_unused=True)
    with _within(mesh):
        first, (cache, _) = compiled(
            "prefill", read, params, inputs, policy=job.policy, new_tokens=job.new_tokens, key=key
        )
        cache = cache if first.program else sharding.place_cache(cache, mesh)
        second, _ = compiled("decode step", step, params, cache, token)
        third = None
        if whole:
            sampling = Greedy(max_new_tokens=job.new_tokens)
            third, _ = compiled("generate", answer, params, inputs, policy=job.policy, sampling=sampling, key=key)
    return _described(job, where, mesh, (first, second, third), params=params, inputs=inputs, cache=cache)


def _described(
    job: Job,
    where: Topology,
    mesh: Any,
    steps: tuple[Step, Step, Step | None],
    *,
    params: Any,
    inputs: Any,
    cache: Any,
) -> Run:
    chip, tried = where.chip, [step for step in steps if step is not None]
    weights, asked = (cost.chip_bytes(tree, chip.platform) for tree in (params, inputs))
    parts = cost.cache_parts(cache, chip.platform)
    times = _times(job, where, mesh, steps[:2], params=params, weights=weights, parts=parts)
    first, second = (dataclasses.replace(step, estimate=time) for step, time in zip(steps[:2], times, strict=True))
    programs = [step.program for step in tried if step.program is not None]
    peaks = [*(program.peak for program in programs), *(step.needed for step in tried if step.needed is not None)]
    used = max([weights + asked + sum(parts.values()), *peaks])
    fits = used <= chip.usable and not any(step.refused for step in tried) and (None if not programs else True)
    needed = max(used, chip.usable + 1)
    remedies = arithmetic.remedies(job, where, mesh.shape["data"], mesh.shape["model"], used=needed, weights=weights)
    return Run(
        policy=job.policy,
        batch=job.batch,
        weights=weights,
        **parts,
        inputs=asked,
        temporaries=max(program.temporaries for program in programs) if len(programs) == len(tried) else None,
        used=used,
        fits=fits,
        remedies=tuple(remedies) if fits is False else (),
        prefill=first,
        decode=second,
        generate=steps[2],
    )


def _times(
    job: Job, where: Topology, mesh: Any, steps: tuple[Step, Step], *, params: Any, weights: int, parts: dict[str, int]
) -> tuple[Estimate | None, Estimate | None]:
    chip, data, slow = where.chip, mesh.shape["data"], SLOWER[job.dtype]
    read_bytes = cost.read_of_cache(job.config.decoder.kinds, parts)
    dense, experts = (cost.chip_bytes(part, chip.platform) for part in cost.read_weights(params))
    chosen = int(cost.experts_read(job.config.decoder, job.batch / data) * experts)
    if not isinstance(mesh, Mesh):
        read_bytes += 2 * parts["states"]  # which are written too
        # Weights that do not divide over `model` are on every chip, and so is the work with them.
        chips = data * round(job.weight_bytes(1, chip.platform) / weights)
        step = dense + chosen
        return by_shapes(job, chip, chips, weights=weights, step_weights=step, read=read_bytes, slowdown=slow)
    first, second = (step.program for step in steps)
    step_options = {"kernel_bytes": read_bytes + chosen, "weights": dense}
    return (
        None if first is None else estimate(first, chip, slowdown=slow),
        None if second is None else estimate(second, chip, slowdown=slow, **step_options),
    )


@contextlib.contextmanager
def _within(mesh: Any) -> Iterator[None]:
    with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh):
        yield
