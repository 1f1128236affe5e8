"""How long a program would take: the slowest of what the chip computes and what it reads, then what chips exchange.

The TPU compiler's own seconds (`optimal_seconds`) are no use for programs with kernels, whose time it does not know:
it gives negative ones. Its operations and bytes are good, except that of a kernel it counts no operations and its
operands whole or not at all, and of a loop one turn. So kernels are counted here: attention over whole prompts from the
shapes that the program itself gives them, and the cache once a step instead of the whole pool in every layer.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vlkv.analysis import cost
from vlkv.planning.arithmetic import Job
from vlkv.planning.chips import Chip
from vlkv.planning.programs import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of one run of a program, if nothing but the chip's own limits held it back."""

    compute: float
    memory: float
    exchange: float
    flops: float  # on one chip
    bytes: float  # on one chip

    @property
    def seconds(self) -> float:
        """Computing and reading overlap; exchanging is taken to wait for both."""
        return max(self.compute, self.memory) + self.exchange

    @property
    def bound(self) -> str:
        """What takes longest."""
        times = {"compute": self.compute, "memory": self.memory, "exchange": self.exchange}
        return max(times, key=lambda name: times[name])


def estimate(
    program: Program, chip: Chip, *, cache_bytes: int | None = None, weights: int = 0, slowdown: float = 1.0
) -> Estimate:
    """Of one program on one chip.

    Args:
        program: compiled.
        chip: where it would run.
        cache_bytes: of a decode step: what its kernels read of the cache, instead of their operands; None: all of them.
        weights: bytes of those that a step reads.
        slowdown: how many times slower than bfloat16 the chip multiplies this dtype.
    """
    moved = program.bytes
    if cache_bytes is not None and program.kernels:
        # Whether the compiler counts a kernel's operands depends on its level: without them weights must remain.
        counted = moved - program.kernel_bytes >= weights
        moved += cache_bytes - (program.kernel_bytes if counted else 0)
    flops = program.flops + program.kernel_flops
    sent = sum(collective.sent for collective in program.collectives)
    return Estimate(compute=flops * slowdown / chip.flops, memory=moved / chip.bandwidth, exchange=sent / chip.link,
                    flops=flops, bytes=moved)  # fmt: skip


def by_shapes(job: Job, chip: Chip, chips: int, *, weights: int, read: int) -> tuple[Estimate, Estimate]:
    """Prefill and a decode step where nothing compiles them: what must be computed and read at least, evenly split.

    Args:
        job: what is asked for; methods that shorten the prompt compute less than this.
        chip: where it would run.
        chips: how many there are.
        weights: bytes of the weights on one chip.
        read: bytes of the cache on one chip.
    """
    c, inputs = job.config.decoder, job.question.inputs
    layers, head = np.ones(c.layers, np.int64), cost.logits_flops(c, 1)
    long = cost.prefill_flops(c, layers * inputs.tokens.shape[1]).sum() + head
    kept = job.policy.bound(layers=c.layers, vision=inputs.max_vision, text=inputs.max_text, images=inputs.max_images)
    one = cost.decode_flops(c, layers * (kept // c.layers + job.new_tokens)).sum() + head
    first, step = (job.batch * float(flops) / chips for flops in (long, one))
    first += job.tower_flops() / chips

    def made(flops: float, moved: int) -> Estimate:
        return Estimate(compute=flops / chip.flops, memory=moved / chip.bandwidth, exchange=0.0, flops=flops,
                        bytes=float(moved))  # fmt: skip

    return made(first, weights + read), made(step, weights + read)
