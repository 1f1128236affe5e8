"""Compiles a program for chips that are not there, and reads off the compiler what it says of it.

What a chip holds, what it computes and moves, and what chips send to one another. The compiler counts the body of a
loop once, and a kernel's work not at all: of a kernel it only knows its operands, which `kernel_bytes` tells apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


class DoesNotFit(Exception):
    """The compiler refused: the program needs more memory than a chip has. `needed`: bytes, 0 where it did not say."""

    def __init__(self, needed: int, message: str, seconds: dict[str, float], out: Any) -> None:
        super().__init__(message)
        self.needed, self.seconds, self.out = needed, seconds, out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """All operations of one kind in a program, on one chip."""

    kind: str
    count: int
    bytes: int  # of their results
    sent: int  # bytes that a chip sends on, around a ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program, of one chip.

    Attributes:
        trace_seconds: from Python to what the compiler reads.
        compile_seconds: the compiler's.
        arguments: bytes, tile padding included, as are all of these.
        outputs: those that reuse an argument's memory included.
        temporaries: the most that lives at once besides.
        aliased: bytes of outputs in the memory of arguments.
        code: bytes of the program itself.
        flops: as the compiler counts them.
        bytes: moved from and to the chip's memory, as the compiler counts them.
        kernels: calls of Pallas kernels.
        kernel_bytes: bytes of their operands, each counted whole, which are part of `bytes`.
        kernel_flops: of attention over whole prompts in kernels, which are no part of `flops`.
        loops: whether there are loops, whose body the compiler counts once.
        collectives: by kind.
    """

    trace_seconds: float
    compile_seconds: float
    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int
    flops: float
    bytes: float
    kernels: int
    kernel_bytes: int
    kernel_flops: float
    loops: bool
    collectives: tuple[Collective, ...]

    @property
    def peak(self) -> int:
        """Bytes that a chip must have for it."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@contextlib.contextmanager
def effort(level: str | None) -> Iterator[None]:
    """Compiles with this optimisation level of XLA (O1: in half the time); None: as jax is configured."""
    before = jax.config.jax_optimization_level  # type: ignore[attr-defined]
    jax.config.update("jax_optimization_level", level or before)
    try:
        yield
    finally:
        jax.config.update("jax_optimization_level", before)


def compile_program(jitted: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Program, Any]:
    """Compiles a jitted function for where its arguments, ShapeDtypeStructs, say that they lie.

    Returns:
        The program, and what it returns: ShapeDtypeStructs placed as the compiler placed them.

    Raises:
        DoesNotFit: the compiler says that no chip of this kind has the memory.
    """
    begin = time.perf_counter()
    traced = jitted.trace(*args, **kwargs)  # type: ignore[attr-defined]
    lowered = traced.lower()
    traced_at = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)
        seconds = {"trace": traced_at - begin, "compile": time.perf_counter() - traced_at}
        raise DoesNotFit(_needed(str(error)), str(error).splitlines()[0], seconds, shapes) from None
    compiled_at = time.perf_counter()
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    cost = cost[0] if isinstance(cost, list) else cost or {}
    program = Program(
        trace_seconds=traced_at - begin,
        compile_seconds=compiled_at - traced_at,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=float(cost.get("flops", 0.0)),
        bytes=float(cost.get("bytes accessed", 0.0)),
        collectives=tuple(collectives(text)),
        loops=re.search(r"[ )]while\(", text) is not None,
        **kernels(text),
    )
    placed = jax.tree.map(
        lambda x, there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), traced.out_info,
        compiled.output_shardings,
    )  # fmt: skip
    return program, placed


def _needed(message: str) -> int:
    """ "... (18.04G) exceeds available HBM (15.75G)" or, of older ones, "Used 18.04G of 15.75G hbm", in bytes."""
    found = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available|Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message)
    if found is None:
        return 0
    number, unit = (part for part in found.groups() if part is not None)
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


_RESULT = r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) "


def collectives(text: str) -> Iterator[Collective]:
    """What chips send to one another, from a compiled program's text.

    One operation may stand there several times, once for every stage of its running beside others: it is told by its
    channel.
    """
    pattern = re.compile(_RESULT + rf"({'|'.join(COLLECTIVES)})(-start)?\((.*)$", re.MULTILINE)
    found: dict[str, dict[Any, tuple[int, int]]] = {kind: {} for kind in COLLECTIVES}
    for number, match in enumerate(pattern.finditer(text)):
        result, kind, started, rest = match.groups()
        size, group = _shape_bytes(result, last=bool(started)), _group(rest)
        channel = re.search(r"channel_id=(\d+)", rest)
        sent = {
            "all-reduce": 2 * size * (group - 1) // group,
            "all-gather": size * (group - 1) // group,
            "reduce-scatter": size * (group - 1),
            "collective-permute": size,
            "all-to-all": size * (group - 1) // group,
        }[kind]
        found[kind].setdefault(channel[1] if channel else f"#{number}", (size, sent))
    for kind, operations in found.items():
        if operations:
            sizes, sent_bytes = zip(*operations.values(), strict=True)
            yield Collective(kind=kind, count=len(operations), bytes=sum(sizes), sent=sum(sent_bytes))


def _group(rest: str) -> int:
    """How many chips take part together: `{{0,1},{2,3}}`, `[8,2]<=[16]` or `mesh['a'=4,'b'=2] {'b'}`."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed:
        return max(1, len(listed[1].split(",")))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    if counted:
        return int(counted[1])
    mesh = re.search(r"replica_groups=\w*\[([^\]]*)\] ?\{([^}]*)\}", rest)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh[2]) if name in sizes)
    return 2


def _shape_bytes(text: str, *, last: bool = False) -> int:
    """Bytes of `bf16[4,128]{1,0}`, or of a tuple of such; `last`: of a tuple that starts an operation."""
    sizes = [
        math.prod(int(n) for n in shape.split(",") if n) * _itemsize(kind)
        for kind, shape in re.findall(r"\b(pred|[subf]\w*\d+\w*)\[([\d,]*)\]", text)
    ]
    return (max(sizes[1:] or sizes) if last else sum(sizes)) if sizes else 0


def _itemsize(kind: str) -> int:
    if kind == "pred":
        return 1
    bits = re.search(r"\d+", kind)
    return max(1, int(bits[0]) // 8) if bits else 4


def kernels(text: str) -> dict[str, Any]:
    """The fields of Program that are about kernels."""
    count, total, flops = 0, 0, 0.0
    pattern = re.compile(
        r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) custom-call\(.*custom_call_target=\"tpu_custom_call\"(.*)$", re.MULTILINE
    )
    for name, result, rest in pattern.findall(text):
        found = re.search(r"operand_layout_constraints=\{(.*?\})\}", rest)
        operands = found[1] if found else ""
        count += 1
        total += _shape_bytes(result) + _shape_bytes(operands)
        if name.startswith("splash"):
            flops += _attention_flops(operands)
    return {"kernels": count, "kernel_bytes": total, "kernel_flops": flops}


def _attention_flops(operands: str) -> float:
    """Of one splash attention, from its operands: queries [.., T, H] and keys [.., S, H] are the first with floats.

    A causal one is given the places of its queries, behind two arrays that tell rows from padding, and does half.
    """
    floats = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", operands)
    if len(floats) < 2:
        return 0.0
    q, k = (tuple(map(int, shape.split(","))) for shape in floats[:2])
    places = len(re.findall(r"\bs32\[", operands))
    return 4.0 * math.prod(q) * k[-2] * (0.5 if places > 2 else 1.0)


def tpu_devices(topology: str) -> list[Any]:
    """The chips of a TPU topology, to compile for.

    Raises:
        ModuleNotFoundError: libtpu is not installed.
        ValueError: there is no such topology, by libtpu's own words.
    """
    from jax.experimental import topologies  # noqa: PLC0415 (loads libtpu)

    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError("libtpu")
    # Read when libtpu is loaded: it may be in use by another process, and this machine is no part of a pod.
    for name, value in (("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"), ("TPU_SKIP_MDS_QUERY", "1"),
                        ("TPU_WORKER_HOSTNAMES", "localhost"), ("TPU_STDERR_LOG_LEVEL", "3"),
                        ("TPU_MIN_LOG_LEVEL", "3")):  # fmt: skip
        os.environ.setdefault(name, value)
    sides = [int(side) for side in topology.partition(":")[2].split("x")]
    # Some libtpus take a host of 2 x 2 chips even where there are fewer.
    few = {"chips_per_host_bounds": [*(min(side, 2) for side in sides[:2]), 1]} if min(sides[:2]) < 2 else {}
    try:
        with _without_stderr():
            return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **few).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """libtpu complains there, before any log level counts, that this machine is no TPU."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
