"""Chips (chips.toml), and topologies such as `v5e:4x4` or `a100:1`."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from pathlib import Path

from vlkv.errors import InputError, suggestion

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator; chips.toml has the units."""

    name: str
    platform: str  # "tpu" or "cuda"
    memory: int
    usable: int  # bytes that one program can use
    flops: float
    bandwidth: float
    link: float
    dimensions: int = 1

    @classmethod
    def read(cls) -> dict[str, Chip]:
        """All chips by name."""
        content = tomllib.loads(Path(__file__).with_name("chips.toml").read_text(encoding="utf-8"))
        chips = {}
        for name, fields in content.items():
            # The TPU compiler reserves 1/64: programs get 15.75 of a v5e's 16 GiB. On a GPU, half a GiB is for the
            # driver and for buffers of libraries.
            memory = fields["memory"]
            usable = memory * 63 // 64 if fields["platform"] == "tpu" else memory - GIB // 2
            chips[name] = cls(name=name, usable=usable, **fields)
        return chips


CHIPS = Chip.read()


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
    axes = re.fullmatch(r"(data|model)=([1-9]\d{0,4}),(data|model)=([1-9]\d{0,4})", text.replace(" ", ""))
    if axes is None or axes[1] == axes[3]:
        raise InputError(f"--mesh {text}: expected data=D,model=M, as in data=4,model=4")
    sizes = {axes[1]: int(axes[2]), axes[3]: int(axes[4])}
    data, model = sizes["data"], sizes["model"]
    if data * model != chips:
        known = "; ".join(f"data={data},model={model}" for data, model in factorisations(chips))
        product = f"{data} x {model} = {data * model} chips"
        raise InputError(f"--mesh {text}: {product}, but the topology has {chips}; give one of {known}")
    return data, model


def factorisations(chips: int) -> list[tuple[int, int]]:
    """All (data, model) with the product `chips`, the smallest model axis first."""
    return [(chips // model, model) for model in range(1, chips + 1) if chips % model == 0]
