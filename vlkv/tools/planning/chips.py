"""Specifications of chips, and topologies such as `v5e:4x4` or `a100:1`.

Peak numbers are those of the manufacturers for dense bfloat16, from Cloud TPU's system architecture pages and NVIDIA's
data sheets. A program can use less than the nominal memory, because the runtime needs a part; see `usable`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from vlkv.errors import InputError, suggestion

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator."""

    name: str
    platform: str  # "tpu" or "cuda"
    memory: int  # bytes on the chip
    usable: int  # bytes that one program can use
    flops: float  # operations per second on bfloat16 matrices
    bandwidth: float  # bytes per second from its own memory
    link: float  # bytes per second to other chips, over all links
    dimensions: int = 1  # of a topology


def _tpu(name: str, memory: int, flops: float, bandwidth: float, link: float, dimensions: int) -> Chip:
    # The TPU compiler reserves 1/64: programs get 15.75 of a v5e's 16 GiB.
    return Chip(name=name, platform="tpu", memory=memory * GIB, usable=memory * GIB * 63 // 64, flops=flops,
                bandwidth=bandwidth, link=link, dimensions=dimensions)  # fmt: skip


def _gpu(name: str, memory: int, flops: float, bandwidth: float, link: float) -> Chip:
    # Half a GiB is for the driver and for buffers of libraries.
    return Chip(name=name, platform="cuda", memory=memory, usable=memory - GIB // 2, flops=flops, bandwidth=bandwidth,
                link=link)  # fmt: skip


CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", 32, 275e12, 1.228e12, 300e9, 3),
        _tpu("v5e", 16, 197e12, 0.819e12, 200e9, 2),
        _tpu("v5p", 95, 459e12, 2.765e12, 600e9, 3),
        _tpu("v6e", 32, 918e12, 1.640e12, 400e9, 2),
        _gpu("a100", 84_987_740_160, 312e12, 2.039e12, 300e9),
        _gpu("a100-40", 42_405_855_232, 312e12, 1.555e12, 300e9),
        _gpu("h100", 85_520_809_984, 989e12, 3.352e12, 450e9),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips of one kind in an arrangement such as 4 x 4."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """The name that `parse` accepts."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse(text: str) -> Topology:
    """Parses `v5e:4x4`, `v4:2x2x1` or `a100:8`; InputError lists the known chips."""
    name, colon, sizes = text.lower().partition(":")
    chip = CHIPS.get(name)
    if chip is None:
        hint = suggestion(name, CHIPS, f"chips are {', '.join(CHIPS)}")
        raise InputError(f"--topology {text}: no chip {name!r}; {hint}")
    example = f"{name}:" + "x".join(["4", "4", "4"][: chip.dimensions])
    if not colon or not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", sizes):
        raise InputError(f"--topology {text}: give the number of chips as in {example}")
    shape = tuple(map(int, sizes.split("x")))
    if len(shape) != chip.dimensions:
        raise InputError(f"--topology {text}: {name} is arranged in {chip.dimensions} dimension(s), as in {example}")
    return Topology(chip, shape)


def parse_mesh(text: str, chips: int) -> tuple[int, int]:
    """Parses `data=4,model=4`, the numbers of chips along the axes; InputError if their product is not `chips`."""
    found = re.fullmatch(r"(data|model)=([1-9]\d{0,4}),(data|model)=([1-9]\d{0,4})", text.replace(" ", ""))
    if found is None or found[1] == found[3]:
        raise InputError(f"--mesh {text}: expected data=D,model=M, as in data=4,model=4")
    sizes = {found[1]: int(found[2]), found[3]: int(found[4])}
    data, model = sizes["data"], sizes["model"]
    if data * model != chips:
        raise InputError(f"--mesh {text}: {data} x {model} = {data * model} chips, but the topology has {chips}; "
                         f"give one of {_pairs(factorisations(chips))}")  # fmt: skip
    return data, model


def factorisations(chips: int) -> list[tuple[int, int]]:
    """All (data, model) with the product `chips`, the smallest model axis first."""
    return [(chips // model, model) for model in range(1, chips + 1) if chips % model == 0]


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    return "; ".join(f"data={data},model={model}" for data, model in pairs)
