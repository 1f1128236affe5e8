"""Compiles a program for absent chips, and reads the compiler's analysis of memory, operations and communication.

The compiler counts the body of a loop once. It does not count the operations of a kernel, only its operands, which
`kernel_bytes` contains.
"""

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
    """The program needs more memory than a chip has. `needed`: the bytes, or 0 if the compiler does not report them."""

    def __init__(self, needed: int, message: str, out: Any) -> None:
        super().__init__(message)
        self.needed, self.out = needed, out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """All operations of one kind in a program, on one chip."""

    kind: str
    count: int
    bytes: int  # of their results
    sent: int  # bytes that a chip sends in a ring algorithm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program, on one chip. The first numbers are bytes, including tile padding."""

    trace_seconds: float  # with lowering
    compile_seconds: float
    arguments: int
    outputs: int  # including those in the memory of arguments
    temporaries: int  # the most at one time
    aliased: int  # outputs in the memory of arguments
    code: int
    flops: float  # counted by the compiler
    bytes: float  # moved from and to the chip's memory, counted by the compiler
    kernels: int  # calls of Pallas kernels
    kernel_bytes: int  # their complete operands, which are part of `bytes`
    kernel_flops: float  # attention over whole prompts in kernels, which is not part of `flops`
    loops: bool  # whether there are loops, whose body the compiler counts once
    collectives: tuple[Collective, ...]

    @property
    def peak(self) -> int:
        """Bytes of memory that the program needs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@contextlib.contextmanager
def effort(level: str | None) -> Iterator[None]:
    """Sets XLA's optimisation level (O1 takes half the time); None: jax's configuration."""
    before = jax.config.jax_optimization_level  # type: ignore[attr-defined]
    jax.config.update("jax_optimization_level", level or before)
    try:
        yield
    finally:
        jax.config.update("jax_optimization_level", before)


def compile_program(jitted: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Program, Any]:
    """Compiles a jitted function for the shardings of its arguments; both arguments and results are ShapeDtypeStructs.

    Raises:
        DoesNotFit: the program needs more memory than a chip has.
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
        raise DoesNotFit(_needed(str(error)), str(error).splitlines()[0], shapes) from None
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

    def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return program, jax.tree.map(placed, traced.out_info, compiled.output_shardings)


def _needed(message: str) -> int:
    """Bytes from "... (18.04G) exceeds available HBM (15.75G)" or, in older versions, "Used 18.04G of 15.75G hbm"."""
    size = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available|Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message)
    if size is None:
        return 0
    number, unit = (part for part in size.groups() if part is not None)
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


_RESULT = r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) "


def collectives(text: str) -> Iterator[Collective]:
    """The collective operations in the text of a compiled program.

    An asynchronous operation occurs several times in the text, with the same channel, and is counted once.
    """
    pattern = re.compile(_RESULT + rf"({'|'.join(COLLECTIVES)})(-start)?\((.*)$", re.MULTILINE)
    by_kind: dict[str, dict[Any, tuple[int, int]]] = {kind: {} for kind in COLLECTIVES}
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
        by_kind[kind].setdefault(channel[1] if channel else f"#{number}", (size, sent))
    for kind, operations in by_kind.items():
        if operations:
            sizes, sent_bytes = zip(*operations.values(), strict=True)
            yield Collective(kind=kind, count=len(operations), bytes=sum(sizes), sent=sum(sent_bytes))


def _group(rest: str) -> int:
    """Chips per group, from `{{0,1},{2,3}}`, `[8,2]<=[16]` or `mesh['a'=4,'b'=2] {'b'}`."""
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
    """Bytes of `bf16[4,128]{1,0}`, or of a tuple; `last`: only the result in the tuple of a "-start" operation."""
    sizes = [
        math.prod(int(n) for n in shape.split(",") if n) * max(1, int(bits or 8) // 8)
        for bits, shape in re.findall(r"\b(?:pred|[subf][a-z]*(\d+)\w*)\[([\d,]*)\]", text)
    ]
    return (max(sizes[1:] or sizes) if last else sum(sizes)) if sizes else 0


def kernels(text: str) -> dict[str, Any]:
    """The fields of Program for kernels."""
    count, total, flops = 0, 0, 0.0
    pattern = re.compile(
        r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) custom-call\(.*custom_call_target=\"tpu_custom_call\"(.*)$", re.MULTILINE
    )
    for name, result, rest in pattern.findall(text):
        listed = re.search(r"operand_layout_constraints=\{(.*?\})\}", rest)
        operands = listed[1] if listed else ""
        count += 1
        total += _shape_bytes(result) + _shape_bytes(operands)
        if name.startswith("splash"):
            flops += _attention_flops(operands)
    return {"kernels": count, "kernel_bytes": total, "kernel_flops": flops}


def _attention_flops(operands: str) -> float:
    """Operations of a splash attention kernel. Its first float operands are queries [.., T, H] and keys [.., S, H].

    A causal kernel has a third integer operand, the positions of queries, and computes half.
    """
    floats = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", operands)
    if len(floats) < 2:
        return 0.0
    q, k = (tuple(map(int, shape.split(","))) for shape in floats[:2])
    places = len(re.findall(r"\bs32\[", operands))
    return 4.0 * math.prod(q) * k[-2] * (0.5 if places > 2 else 1.0)


# libtpu reads these when it is loaded: another process may use it, and this machine is not part of a pod.
_LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def tpu_devices(topology: str) -> list[Any]:
    """The chips of a TPU topology, to compile for.

    Raises:
        ModuleNotFoundError: libtpu is not installed.
        ValueError: there is no such topology; the message is libtpu's.
    """
    from jax.experimental import topologies  # noqa: PLC0415 (loads libtpu)

    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError("libtpu")
    os.environ |= {**_LIBTPU, **os.environ}
    sides = [int(side) for side in topology.partition(":")[2].split("x")]
    # Some versions of libtpu assume 2 x 2 chips per host even if the topology has fewer.
    few = {"chips_per_host_bounds": [*(min(side, 2) for side in sides[:2]), 1]} if min(sides[:2]) < 2 else {}
    try:
        with _without_stderr():
            return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **few).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Hides stderr, because libtpu warns that this machine is not a TPU before it reads log levels."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
