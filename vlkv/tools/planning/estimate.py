"""Estimates the time of a program: the larger of computing and memory access, plus communication between chips.

The TPU compiler's time (`optimal_seconds`) cannot be used for programs with kernels, for which it is negative. The
compiler's counts of operations and bytes are good, except for kernels, whose operations it does not count and whose
operands it counts completely or not at all, and for loops, of which it counts one iteration. So kernels are counted
here: attention over whole prompts from the shapes in the program, and per decode step the cache once, instead of the
whole pool in every layer, and the experts that get a token.
"""

import dataclasses

import numpy as np

from vlkv.analysis import cost
from vlkv.compression.sizes import total_bound
from vlkv.tools.planning.arithmetic import Job
from vlkv.tools.planning.chips import Chip
from vlkv.tools.planning.programs import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of one run of a program at the peak performance of the chip."""

    compute: float
    memory: float
    exchange: float
    flops: float  # on one chip
    bytes: float  # on one chip

    @property
    def seconds(self) -> float:
        """Total time: computing and memory access overlap, communication does not."""
        return max(self.compute, self.memory) + self.exchange

    @property
    def bound(self) -> str:
        """The part that takes longest: compute, memory or exchange."""
        times = {"compute": self.compute, "memory": self.memory, "exchange": self.exchange}
        return max(times, key=lambda name: times[name])


def estimate(
    program: Program, chip: Chip, *, kernel_bytes: int | None = None, weights: int = 0, slowdown: float = 1.0
) -> Estimate:
    """The estimate of one compiled program on one chip.

    Args:
        program: compiled.
        chip: the chip.
        kernel_bytes: of a decode step: the cache and experts that its kernels read; None: all operands of kernels.
        weights: bytes of the other weights that a step reads.
        slowdown: time of matrix products in this dtype relative to bfloat16.
    """
    moved = program.bytes
    if kernel_bytes is not None and program.kernels:
        # At some optimisation levels the compiler does not count operands of kernels. It does, if the rest of the bytes
        # is at least that of the weights.
        counted = moved - program.kernel_bytes >= weights
        moved += kernel_bytes - (program.kernel_bytes if counted else 0)
    flops = program.flops + program.kernel_flops
    sent = sum(collective.sent for collective in program.collectives)
    return _at_peak(chip, flops, moved, slowdown, sent)


def _at_peak(chip: Chip, flops: float, moved: float, slowdown: float, sent: int = 0) -> Estimate:
    compute = flops * slowdown / chip.flops
    exchange = sent / chip.link
    return Estimate(compute=compute, memory=moved / chip.bandwidth, exchange=exchange, flops=flops, bytes=float(moved))


def by_shapes(
    job: Job, chip: Chip, chips: int, *, weights: int, step_weights: int, read: int, slowdown: float = 1.0
) -> tuple[Estimate, Estimate]:
    """Prefill and a decode step without a compiler: the least operations and bytes, divided evenly among chips.

    Methods that reduce the prompt compute less than this. `weights`, `step_weights` (those that a decode step reads)
    and `read` (of the cache) are bytes on one chip; `chips` divide the operations.
    """
    c, inputs = job.config.decoder, job.question.inputs
    layers, head, length = np.ones(c.layers, np.int64), cost.logits_flops(c, 1), inputs.tokens.shape[1]
    windows = [kind.window for kind in c.kinds]
    reach = np.array([length if window is None else window for window in windows])
    long = cost.prefill_flops(c, layers * length, reach).sum() + head
    kept = total_bound(job.policy, layers=c.full_layers, **inputs.bounds.sizes)
    kept = kept // max(c.full_layers, 1)
    held = [kept if window is None else length for window in windows]
    limits = [np.inf if window is None else window for window in windows]
    token = cost.decode_flops(c, np.minimum(np.array(held) + job.new_tokens, limits)).sum() + head
    first, step = (job.batch * float(flops) / chips for flops in (long, token))
    if inputs.pixels is not None:
        first += cost.any_tower_flops(job.config, inputs.pixels.shape) / chips

    def peak(flops: float, moved: int) -> Estimate:
        return _at_peak(chip, flops, moved, slowdown)

    return peak(first, weights + read), peak(step, step_weights + read)
