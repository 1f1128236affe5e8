"""Arithmetic without a compiler: the choice of the mesh, and changes that would fit."""

import dataclasses
from collections.abc import Iterator

import jax

from vlkv.analysis import cost
from vlkv.compression.compose import at_keep
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.policies import Policy
from vlkv.tools.planning.chips import CHIPS, GIB, Chip, Topology, factorisations
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
