"""Compiles the programs of one policy and summarises them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vlkv import sharding
from vlkv.compression.slots import slots_of
from vlkv.config import LayerKind
from vlkv.generation.decode import decode_step
from vlkv.generation.generate import generate
from vlkv.generation.prefill import prefill
from vlkv.generation.sampling import Greedy
from vlkv.policies import Policy
from vlkv.tools.planning import arithmetic
from vlkv.tools.planning.arithmetic import Job
from vlkv.tools.planning.chips import Topology
from vlkv.tools.planning.estimate import Estimate, by_shapes, estimate
from vlkv.tools.planning.footprint import chip_bytes
from vlkv.tools.planning.programs import DoesNotFit, Program, compile_program

SLOWER = {"bfloat16": 1.0, "float32": 6.0}  # a float32 product is six bfloat16 products; GPUs' TF32 is not used


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Prefill, one decode step, or `generate`.

    Attributes:
        program: None if it was refused, or if no compiler for the chip is available.
        refused: whether the compiler refused it, because it needs more memory than a chip has.
        estimate: of its time; None if it was refused.
        argument_bytes: bytes of its arguments on one chip, computed from shapes, including tile padding.
        seconds: time of compiling, including tracing and lowering.
    """

    program: Program | None
    refused: bool
    estimate: Estimate | None
    argument_bytes: int
    seconds: float

    @property
    def compiled(self) -> bool:
        """Whether a compiler was called."""
        return self.refused or self.program is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The job with one policy. Bytes are those of one chip, including tile padding.

    Attributes:
        pool: keys and values of the prompt.
        tail: keys and values of new tokens.
        rings: keys and values of layers with a sliding window.
        states: states of recurrent layers.
        index: arrays of the cache that describe where entries are.
        temporaries: greatest size of temporaries in any program; None if one was refused or if there is no compiler.
        used: greatest memory that is needed at once.
        fits: whether a chip has this memory; None: it has, but temporaries are unknown and may need more.
        remedies: changes that would fit, if it does not.
        generate: prefill and all steps in one program, if requested.
    """

    policy: Policy
    batch: int
    weights: int
    pool: int
    tail: int
    rings: int
    states: int
    index: int
    inputs: int
    temporaries: int | None
    used: int
    fits: bool | None
    remedies: tuple[str, ...]
    prefill: Step
    decode: Step
    generate: Step | None = None

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
    """Compiles prefill, and a decode step on the cache that prefill returns.

    Args:
        job: the job with its policy.
        where: the chips.
        mesh: mesh of the chips; an abstract mesh if no compiler is available, and then only shapes are computed.
        params: shapes with shardings.
        say: called with one line before each program is compiled.
        whole: compile `generate` too.
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
    made = _Attempts(mesh, type(job.policy).__name__, say)
    with _within(mesh):
        cache, _ = made.compile("prefill", read, params, inputs, job.policy, new_tokens=job.new_tokens, key=key)
        cache = cache if made.programs["prefill"] else sharding.place_cache(cache, mesh)
        made.compile("decode step", step, params, cache, token)
        if whole:
            sampling = Greedy(max_new_tokens=job.new_tokens)
            made.compile("generate", answer, params, inputs, policy=job.policy, sampling=sampling, key=key)
    return _described(job, where, made, params=params, inputs=inputs, cache=cache, token=token)


def _described(job: Job, where: Topology, made: _Attempts, *, params: Any, inputs: Any, cache: Any, token: Any) -> Run:
    chip, mesh = where.chip, made.mesh

    def size(tree: Any) -> int:
        return chip_bytes(tree, chip.platform)

    weights, parts = size(params), arithmetic.kept_bytes(cache, size)
    read_bytes = _read_of_cache(job.config.decoder.kinds, parts)
    first, second = made.programs["prefill"], made.programs["decode step"]
    slow, (dense, experts) = SLOWER[job.dtype], map(size, _read_in_a_step(params))
    chosen = int(arithmetic.experts_read(job, mesh.shape["data"]) * experts)
    times: tuple[Estimate | None, Estimate | None] = (
        None if first is None else estimate(first, chip, slowdown=slow),
        None
        if second is None
        else estimate(second, chip, kernel_bytes=read_bytes + chosen, weights=dense, slowdown=slow),
    )
    if not isinstance(mesh, Mesh):
        read_bytes += 2 * parts["states"]  # which are written too
        # Weights that do not divide over `model` are on every chip, and so is the work with them.
        share = round(arithmetic.weight_bytes(job.config, job.dtype, 1, chip.platform) / weights)
        times = by_shapes(
            job, chip, mesh.shape["data"] * share, weights=weights, step_weights=dense + chosen, read=read_bytes,
            slowdown=slow,
        )  # fmt: skip
    compiled = [program for program in made.programs.values() if program is not None]
    known = weights + size(inputs) + sum(parts.values())
    used = max([known, *(program.peak for program in compiled), *made.refused.values()])
    fits = used <= chip.usable and not made.refused and (None if not compiled else True)
    remedies = arithmetic.remedies(
        job, where, mesh.shape["data"], mesh.shape["model"], used=max(used, chip.usable + 1), weights=weights
    )

    def described(what: str, arguments: Any, time: Estimate | None = None) -> Step:
        return Step(program=made.programs[what], refused=what in made.refused, estimate=time,
                    argument_bytes=size(arguments), seconds=made.seconds[what])  # fmt: skip

    return Run(
        policy=job.policy, batch=job.batch, weights=weights, **parts, inputs=size(inputs),
        temporaries=None if None in made.programs.values() else max(program.temporaries for program in compiled),
        used=used, fits=fits, remedies=tuple(remedies) if fits is False else (),
        prefill=described("prefill", (params, inputs), times[0]),
        decode=described("decode step", (params, cache, token), times[1]),
        generate=described("generate", (params, inputs)) if "generate" in made.programs else None,
    )  # fmt: skip


def _read_in_a_step(params: Any) -> tuple[Any, Any]:
    """The weights that a decode step reads: all layers and the head, and experts, of which it reads some.

    Of the embedding, and of the table of vectors for every layer (Gemma 4), it reads only one row.
    """
    decoder = params.decoder
    given = decoder.layer_inputs
    mixed = None if given is None else (given.projection, given.norm)
    experts = [(e.gate, e.up, e.down) for layer in decoder.layers if (e := layer.experts) is not None]
    inside = {id(leaf) for leaf in jax.tree.leaves(experts)}
    head = decoder.embedding if decoder.head is None else decoder.head
    return [leaf for leaf in jax.tree.leaves((decoder.layers, mixed, head)) if id(leaf) not in inside], experts


def _read_of_cache(kinds: Sequence[LayerKind], parts: dict[str, int]) -> int:
    """Bytes of the cache that a decode step reads. Layers with shared keys and values read those of an earlier one."""
    with_window, without = ([kind for kind in kinds if (kind.window is not None) == windows and not kind.recurrent]
                            for windows in (True, False))  # fmt: skip
    rings, pool = (len(every) / max(1, sum(not kind.shared for kind in every)) for every in (with_window, without))
    return int(pool * (parts["pool"] + parts["tail"]) + rings * parts["rings"])


@contextlib.contextmanager
def _within(mesh: Any) -> Iterator[None]:
    with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh):
        yield
