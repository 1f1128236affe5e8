"""Arithmetic without a compiler: the choice of the mesh, changes that would fit, and times.

The time of a program is the larger of computing and memory access, plus communication between chips. The TPU
compiler's time (`optimal_seconds`) cannot be used for programs with kernels, for which it is negative. Its counts of
operations and bytes are good, except for kernels, whose operations it does not count and whose operands it counts
completely or not at all, and for loops, of which it counts one iteration. So kernels are counted here: attention over
whole prompts from the shapes in the program, and per decode step the cache once, instead of the whole pool in every
layer, and the experts that get a token.
"""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from vlkv.analysis import cost
from vlkv.compression.compose import at_keep
from vlkv.compression.sizes import total_bound
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.policies import Policy
from vlkv.tools.planning.chips import CHIPS, GIB, Chip, Topology, factorisations
from vlkv.tools.planning.programs import Program
from vlkv.tools.planning.questions import Question

_KEEPS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
_SMALLER = {"float32": "bfloat16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be computed, independent of the chips."""

    config: ModelConfig
    dtype: str
    policy: Policy
    question: Question
    batch: int
    new_tokens: int

    @property
    def itemsize(self) -> int:
        """Bytes per number of the cache."""
        return int(jax.numpy.dtype(self.dtype).itemsize)

    def row_bytes(self, model: int = 1) -> float:
        """Bytes of one row's cache on all `model` chips; see `cost.row_bytes`."""
        decoder, new, sizes = self.config.decoder, self.new_tokens, self.question.inputs.bounds.sizes
        return cost.row_bytes(self.policy, decoder, self.itemsize, model, new_tokens=new, **sizes)

    def weight_bytes(self, model: int, platform: str) -> int:
        """Bytes of the weights on one of `model` chips that share them."""
        return cost.weight_bytes(self.config, self.dtype, model, platform)


def choose_mesh(job: Job, topology: Topology) -> tuple[int, int, str]:
    """Chooses (data, model) over all chips, and gives the reason.

    Prefers few chips on `model`, because chips on `data` do not wait for one another: the fewest for which the job fits
    and the weights take at most a quarter of the memory, else at most half. If there is no such mesh, takes the most
    chips on `model` for which the job fits. Meshes that divide the heads come before all others, unless weights would
    take more than three quarters of the memory.

    Raises:
        InputError: no mesh of this number of chips divides the batch.
    """
    chip, c = topology.chip, job.config.decoder
    possible = [(data, model) for data, model in factorisations(topology.count) if job.batch % data == 0]
    # More chips on `model` than heads would only wait.
    dividing = [(data, model) for data, model in possible if c.heads % model == 0 and c.kv_heads % model == 0]
    split = [(data, model) for data, model in possible if model <= c.heads]
    if not split:
        least = min(data for data, model in factorisations(topology.count) if model <= c.heads)
        need = f"{topology.count} chips need at least {least} rows, since at most {c.heads} chips share its heads"
        raise InputError(f"--batch {job.batch}: {need}; give a multiple of {least}, or fewer chips")
    weights = {model: job.weight_bytes(model, chip.platform) for _, model in {*dividing, *split}}

    def fits(data: int, model: int, share: float) -> bool:
        cache = job.batch * job.row_bytes(model) / topology.count
        return weights[model] <= share * chip.usable and weights[model] + cache <= chip.usable

    order = [(share, pairs) for pairs in (dividing, split) for share in (0.25, 0.5, 0.75)]
    tried = (
        (share, *pair)
        for share, pairs in (*order, (1.0, dividing), (1.0, split))
        for pair in (pairs if share <= 0.5 else pairs[::-1])
    )
    last = (dividing or split)[-1]
    data, model = next(((data, model) for share, data, model in tried if fits(data, model, share)), last)
    heads = f"{c.heads} heads and {c.kv_heads} key heads divide over model={model}"
    if (data, model) not in dividing:
        heads = f"{c.kv_heads} key heads do not divide over model={model}"
    return data, model, f"data={data}, model={model}: {heads}, {gib(weights[model])} of weights a chip"


def remedies(job: Job, topology: Topology, data: int, model: int, *, used: int, weights: int) -> Iterator[str]:
    """Changes that would fit if a chip needs `used` bytes, of which `weights` are the weights.

    All other bytes are taken as proportional to the rows on a chip, and to 1 / `model`.
    """
    chip = topology.chip
    rows, usable = job.batch // data, chip.usable
    per_row = max(1.0, (used - weights) / rows)
    fewer = int((usable - weights) // per_row)
    if 0 < fewer < rows:
        yield f"--batch {fewer * data}: {gib(weights + fewer * per_row)} a chip"
    yield from _more_chips(job, topology, data, model, per_row * rows)
    yield from _smaller_keep(job, chip, rows, model, used)
    smaller = _SMALLER.get(job.dtype)
    if smaller:
        need = cost.weight_bytes(job.config, smaller, model, chip.platform) + (used - weights) / 2
        if need <= usable:
            yield f"--dtype {smaller}: {gib(need)} a chip"
    larger = [other for other in CHIPS.values() if other.platform == chip.platform and used <= other.usable]
    if larger:
        best = min(larger, key=lambda other: other.memory)
        yield f"chips with more memory: {best.name} ({gib(best.memory)} each)"


def _more_chips(job: Job, topology: Topology, data: int, model: int, others: float) -> Iterator[str]:
    """The same job on 2, 4, 8... times as many chips on `model`."""
    c = job.config.decoder
    times = 2
    while model * times <= c.heads:
        if c.heads % (model * times) == 0:
            need = job.weight_bytes(model * times, topology.chip.platform) + others / times
            if need <= topology.chip.usable:
                mesh = f"--mesh data={data},model={model * times}"
                yield f"{topology.count * times} chips with {mesh}: {gib(need)} a chip"
                return
        times *= 2


def _smaller_keep(job: Job, chip: Chip, rows: int, model: int, used: int) -> Iterator[str]:
    """A smaller keep; temporaries are assumed to stay the same."""
    policy, now = job.policy, job.row_bytes(model)
    keeps = [keep for keep in _KEEPS if policy.keep is None or keep < policy.keep]
    for keep in keeps if policy.facts.selects else ():
        try:
            smaller = at_keep(policy, keep)
        except InputError:
            return
        need = used - rows * (now - dataclasses.replace(job, policy=smaller).row_bytes(model)) / model
        if need <= chip.usable:
            yield f"--keep {keep}: {gib(need)} a chip"
            return


def gib(n: float) -> str:
    """`3.54 GiB`, or MiB below a tenth of one."""
    return f"{n / GIB:.2f} GiB" if n >= 0.1 * GIB else f"{n / 2**20:.1f} MiB"


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

    `kernel_bytes` are the bytes of cache and experts that the kernels of a decode step read (None: all operands of
    kernels), `weights` those of the other weights that it reads. `slowdown` is the time of matrix products in this
    dtype relative to bfloat16.
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
