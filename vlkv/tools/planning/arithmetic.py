"""Arithmetic without a compiler: bytes of weights and cache on one chip, choice of the mesh, changes that would fit.

Axes: B batch · P pool slots · K key heads · H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from vlkv import sharding
from vlkv.analysis.cost import row_bytes
from vlkv.compression.compose import at_keep
from vlkv.compression.sizes import cache_spec
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.families import shapes_by_path
from vlkv.policies import Policy
from vlkv.tools.planning.chips import CHIPS, GIB, Chip, Topology, factorisations
from vlkv.tools.planning.footprint import rule
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
        """Bytes of one row's cache on all `model` chips; see `vlkv.analysis.cost.row_bytes`."""
        c = self.config.decoder
        sizes = self.question.inputs.bounds.sizes
        spec = cache_spec(self.policy, layers=c.full_layers, new_tokens=self.new_tokens, windows=c.sliding, **sizes)
        return row_bytes(spec, c, self.itemsize, model)

    def tower_flops(self) -> float:
        """Approximate operations of the vision tower on the whole batch: each weight once per patch, and attention."""
        c, pixels = self.config.vision, self.question.inputs.pixels
        if c is None or pixels is None:
            return 0.0
        weights = sum(math.prod(shape) for path, shape in _weights(self.config).items() if path.startswith("vision."))
        patches = c.patches(pixels.shape)
        attention = 4.0 * patches**2 * c.width * c.blocks
        return pixels.shape[0] * (2.0 * weights * patches + attention)


def weight_bytes(config: ModelConfig, dtype: str, model: int, platform: str) -> int:
    """Bytes of the weights on one of `model` chips that share them."""
    mesh: Any = AbstractMesh((1, model), ("data", "model"))
    pad = rule(platform)
    total = 0
    for path, shape in _weights(config).items():
        placed = NamedSharding(mesh, sharding.spec(path, shape, mesh))
        total += pad(placed.shard_shape(shape), jax.numpy.dtype(dtype))
    return total


def parameters(config: ModelConfig) -> tuple[int, int]:
    """Numbers of parameters: stored ones, and active ones, which are those without the experts that a token skips."""
    stored = sum(map(math.prod, _weights(config).values()))
    return stored, stored - config.decoder.idle_parameters


def experts_read(job: Job, data: int) -> float:
    """The share of its experts that a decode step reads on one of `data` chips, if every expert is equally likely."""
    e = job.config.decoder.experts
    return 1.0 if e is None else 1 - (1 - e.active / e.count) ** (job.batch / data)


@functools.lru_cache(maxsize=8)
def _weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Path and shape of every weight."""
    return shapes_by_path(config)


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
    whole = [(data, model) for data, model in possible if c.heads % model == 0 and c.kv_heads % model == 0]
    split = [(data, model) for data, model in possible if model <= c.heads]
    if not split:
        least = min(data for data, model in factorisations(topology.count) if model <= c.heads)
        raise InputError(f"--batch {job.batch}: {topology.count} chips need at least {least} rows, since at most "
                         f"{c.heads} chips share its heads; give a multiple of {least}, or fewer chips")  # fmt: skip
    weights = {model: weight_bytes(job.config, job.dtype, model, chip.platform) for _, model in {*whole, *split}}
    tried = [one for pairs in (whole, split) for one in ((0.25, pairs), (0.5, pairs), (0.75, pairs[::-1]))]
    for share, pairs in (*tried, (1.0, whole[::-1]), (1.0, split[::-1])):
        for data, model in pairs:
            cache = job.batch * job.row_bytes(model) / topology.count
            if weights[model] <= share * chip.usable and weights[model] + cache <= chip.usable:
                return data, model, _reason(c, data, model, weights[model], whole=(data, model) in whole)
    data, model = (whole or split)[-1]
    return data, model, _reason(c, data, model, weights[model], whole=bool(whole))


def _reason(c: Any, data: int, model: int, weights: int, *, whole: bool) -> str:
    heads = f"{c.heads} heads and {c.kv_heads} key heads divide over model={model}"
    if not whole:
        heads = f"{c.kv_heads} key heads do not divide over model={model}"
    return f"data={data}, model={model}: {heads}, {gib(weights)} of weights a chip"


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
        need = weight_bytes(job.config, smaller, model, chip.platform) + (used - weights) / 2
        if need <= usable:
            yield f"--dtype {smaller}: {gib(need)} a chip"
    larger = [other for other in CHIPS.values() if other.platform == chip.platform and used <= other.usable]
    if larger:
        best = min(larger, key=lambda other: other.memory)
        yield f"chips with more memory: {best.name} ({gib(best.memory)} each)"


def _more_chips(job: Job, topology: Topology, data: int, model: int, others: float) -> Iterator[str]:
    """The same job on 2, 4, 8... times as many chips on `model`."""
    c = job.config.decoder
    more = 2
    while model * more <= c.heads:
        if c.heads % (model * more) == 0:
            need = weight_bytes(job.config, job.dtype, model * more, topology.chip.platform) + others / more
            if need <= topology.chip.usable:
                yield (f"{topology.count * more} chips with --mesh data={data},model={model * more}: {gib(need)} "
                       "a chip")  # fmt: skip
                return
        more *= 2


def _smaller_keep(job: Job, chip: Chip, rows: int, model: int, used: int) -> Iterator[str]:
    """A smaller keep; temporaries are assumed to stay the same."""
    now = job.row_bytes(model)
    policy = job.policy
    compressed = policy if policy.facts.selects else None
    for keep in _KEEPS:
        if compressed is None or (policy.keep is not None and keep >= policy.keep):
            continue
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


def kept_bytes(cache: Any, chip_bytes: Any) -> dict[str, int]:
    """Bytes on one chip of a cache's parts: `pool`, `tail`, `rings`, `states` and `index`.

    The last are the arrays that locate the entries.
    """
    parts = {name: chip_bytes(arrays) for name, arrays in cache.kept.items()}
    return {**parts, "index": chip_bytes(cache) - sum(parts.values())}
