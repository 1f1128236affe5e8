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
    refused: bool  # whether the compiler refused it, because it needs more memory than a chip has
    estimate: Estimate | None  # of its time; None if it was refused
    argument_bytes: int  # of its arguments on one chip, computed from shapes, including tile padding
    seconds: float  # of compiling, including tracing and lowering

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


class _Attempts:
    """Compiles programs and records which do not fit."""

    def __init__(self, mesh: Any, name: str, say: Callable[[str], None]) -> None:
        self.mesh, self.name, self.say = mesh, name, say
        self.programs: dict[str, Program | None] = {}
        self.seconds: dict[str, float] = {}
        self.refused: dict[str, int] = {}  # programs that need more memory than a chip has -> bytes; 0: not reported

    def compile(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compiles a function; returns the shapes of its results, with shardings if a compiler has chosen them."""
        begin, program = time.perf_counter(), None
        self.say(f"{'compiling' if isinstance(self.mesh, Mesh) else 'computing the shapes of'} {self.name}: {what}")
        if not isinstance(self.mesh, Mesh):
            out = jax.eval_shape(function, *args, **kwargs)
        else:
            try:
                program, out = compile_program(function, *args, **kwargs)
            except DoesNotFit as error:
                out, self.refused[what] = error.out, error.needed
        self.programs[what], self.seconds[what] = program, time.perf_counter() - begin
        return out


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

    # keep_unused, because inputs take memory on the chip even if a program does not use them.
    read = jax.jit(prefill, static_argnames="new_tokens", keep_unused=True)
    step = jax.jit(decode_step, donate_argnames="cache", keep_unused=True)
    answer = jax.jit(generate, keep_unused=True)
    attempts = _Attempts(mesh, type(job.policy).__name__, say)
    with _within(mesh):
        cache, _ = attempts.compile("prefill", read, params, inputs, job.policy, new_tokens=job.new_tokens, key=key)
        cache = cache if attempts.programs["prefill"] else sharding.place_cache(cache, mesh)
        attempts.compile("decode step", step, params, cache, token)
        if whole:
            sampling = Greedy(max_new_tokens=job.new_tokens)
            attempts.compile("generate", answer, params, inputs, policy=job.policy, sampling=sampling, key=key)
    return _described(job, where, attempts, params=params, inputs=inputs, cache=cache, token=token)


def _described(
    job: Job, where: Topology, attempts: _Attempts, *, params: Any, inputs: Any, cache: Any, token: Any
) -> Run:
    chip, mesh, programs = where.chip, attempts.mesh, attempts.programs

    def size(tree: Any) -> int:
        return cost.chip_bytes(tree, chip.platform)

    weights, parts = size(params), cost.cache_parts(cache, chip.platform)
    times = _times(job, where, attempts, params=params, weights=weights, parts=parts)
    compiled = [program for program in programs.values() if program is not None]
    known = weights + size(inputs) + sum(parts.values())
    used = max([known, *(program.peak for program in compiled), *attempts.refused.values()])
    fits = used <= chip.usable and not attempts.refused and (None if not compiled else True)
    needed = max(used, chip.usable + 1)
    remedies = arithmetic.remedies(job, where, mesh.shape["data"], mesh.shape["model"], used=needed, weights=weights)

    def described(what: str, arguments: Any, time: Estimate | None = None) -> Step:
        return Step(
            program=programs[what],
            refused=what in attempts.refused,
            estimate=time,
            argument_bytes=size(arguments),
            seconds=attempts.seconds[what],
        )

    return Run(
        policy=job.policy,
        batch=job.batch,
        weights=weights,
        **parts,
        inputs=size(inputs),
        temporaries=None if None in programs.values() else max(program.temporaries for program in compiled),
        used=used,
        fits=fits,
        remedies=tuple(remedies) if fits is False else (),
        prefill=described("prefill", (params, inputs), times[0]),
        decode=described("decode step", (params, cache, token), times[1]),
        generate=described("generate", (params, inputs)) if "generate" in programs else None,
    )


def _times(
    job: Job, where: Topology, attempts: _Attempts, *, params: Any, weights: int, parts: dict[str, int]
) -> tuple[Estimate | None, Estimate | None]:
    """The times of prefill and of a decode step."""
    chip, data, slow = where.chip, attempts.mesh.shape["data"], SLOWER[job.dtype]
    read_bytes = cost.read_of_cache(job.config.decoder.kinds, parts)
    dense, experts = (cost.chip_bytes(part, chip.platform) for part in cost.read_weights(params))
    chosen = int(cost.experts_read(job.config.decoder, job.batch / data) * experts)
    if not isinstance(attempts.mesh, Mesh):
        read_bytes += 2 * parts["states"]  # which are written too
        # Weights that do not divide over `model` are on every chip, and so is the work with them.
        chips = data * round(job.weight_bytes(1, chip.platform) / weights)
        step = dense + chosen
        return by_shapes(job, chip, chips, weights=weights, step_weights=step, read=read_bytes, slowdown=slow)
    first, second = attempts.programs["prefill"], attempts.programs["decode step"]
    step_options = {"kernel_bytes": read_bytes + chosen, "weights": dense}
    return (
        None if first is None else estimate(first, chip, slowdown=slow),
        None if second is None else estimate(second, chip, slowdown=slow, **step_options),
    )


@contextlib.contextmanager
def _within(mesh: Any) -> Iterator[None]:
    with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh):
        yield
