"""Maps tensors of a checkpoint to our parameters.

A family lists the names of our modules and of the checkpoint's tensors. Shapes and slices follow from the shapes of our
parameters: our projections have an axis for the heads, and several of our parameters may be slices of a fused tensor.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Shape = tuple[int, ...]
# Our projections have axes for heads and channels, which are one axis in checkpoints: the last two of this parameter,
# and the first two of the other projections.
_JOINED = "out.weight"
HEAD = "decoder.head.weight"  # if the checkpoint has it, it is used even if the config says that it is tied


@dataclasses.dataclass(frozen=True)
class Part:
    """One parameter's part of a fused tensor.

    The tensor is reshaped to `view`, its last two axes are exchanged if `swapped`, and then it is sliced by `take`,
    which has a slice for each of the first axes.
    """

    view: Shape
    take: tuple[slice, ...]
    swapped: bool = False

    def of(self, array: np.ndarray) -> np.ndarray:
        """The part of the given tensor."""
        array = array.reshape(self.view)
        return (array.swapaxes(-1, -2) if self.swapped else array)[self.take]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our parameters: name and shape of its tensor in the checkpoint (new names), and its path in our tree.

    If several parameters share a fused tensor, each has an entry with the same key and its part. If a parameter is a
    stack of tensors, it has an entry for each of them, in order.
    """

    key: str
    path: str
    shape: Shape
    part: Part | None = None
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class Fused:
    """A tensor that contains the rows of several of our modules, or of one."""

    key: str
    of: tuple[str, ...] = ("query", "key", "value")  # the names of our modules in it, in order, without their parents
    # False: all rows of the first module, then all rows of the next. True: the rows are grouped by the heads of the
    # last module. With the default of `of`: the queries that share the first key head, its key, its value, and so on.
    by_head: bool = False
    axis: int = 0  # of the rows in our parameters; 1 if these are stacks over experts, whose first axis is the expert
    swapped: bool = False  # the checkpoint has the last two axes in the other order


@dataclasses.dataclass(frozen=True)
class Shaped:
    """A tensor with another shape in the checkpoint; -1 means the size that follows from the other axes."""

    key: str
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A tensor for each entry of our parameter's first axis; `#` in the key stands for the number of the entry."""

    key: str


Name = str | Fused | Shaped | Stacked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The tensor names of a family's checkpoints."""

    # Path of our module or parameter -> its name in the checkpoint; `*` is the number of a layer. The name of a module
    # applies to its weight and bias. If checkpoints differ, a tuple of names; see `make_entries`.
    ours: Mapping[str, Name | tuple[Name, ...]]
    renames: tuple[tuple[str, str], ...] = ()  # (regular expression, replacement) pairs from older names to these
    unused: str = r"(?!)"  # regular expression of tensors that are known and not needed
    blocks: int = 0  # if `unused` captures a number, of a block or layer, only those from this number on are unused
    tower: tuple[str, str] | None = None  # folder and prefix of a tower that may be in a separate folder

    def canonical(self, key: str) -> str:
        """The new name of a tensor in the checkpoint."""
        for pattern, replacement in self.renames:
            key = re.sub(pattern, replacement, key)
        return key

    def ignores(self, key: str) -> bool:
        """Whether a tensor (new name) is known and unused. Buffers of old checkpoints are unused in every family."""
        match = re.search(self.unused, key)
        block = match.groups()[0] if match and match.groups() else None
        unused = match is not None and (block is None or int(block) >= self.blocks)
        return unused or re.search(r"(rotary_emb\.inv_freq|position_ids)$", key) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """All that the converter knows about one checkpoint folder."""

    family: str  # for messages and the manifest
    config: Mapping[str, Any]  # `config.json` of the converted folder
    names: Names
    shapes: Callable[[], Mapping[str, Shape]]  # returns those of our parameters by path, with an output head
    tied: bool  # the embedding table is the output head if the checkpoint has no other
    special: tuple[str, ...] = ()  # special tokens whose ids follow those of a tiktoken file


def make_entries(
    names: Names, shapes: Mapping[str, Shape], present: Mapping[str, Shape] | None = None
) -> tuple[Entry, ...]:
    """The entries of all our parameters, whose shapes by path are given.

    `present` are the shapes of the checkpoint's tensors by new name. They decide between several names of a parameter:
    the name for which the checkpoint has most tensors is used. If several names lead to the same tensors, it is the one
    whose shapes are those of the checkpoint.
    """
    present = present or {}

    def agreement(entries: tuple[Entry, ...]) -> tuple[float, bool]:
        share = sum(entry.key in present for entry in entries) / len(entries)
        return share, all(present.get(entry.key) == entry.shape for entry in entries)

    entries: list[Entry] = []
    for path in shapes:
        options, suffix = _options(names.ours, path)
        best = max((_entries(name, suffix, path, shapes) for name in options), key=agreement)
        entries += best
    return tuple(entries)


def _options(ours: Mapping[str, Name | tuple[Name, ...]], path: str) -> tuple[tuple[Name, ...], str]:
    """The possible names of a parameter, and the suffix that follows them in the checkpoint, such as `.weight`."""
    general = re.sub(r"\.\d+\.", ".*.", path)
    module, _, leaf = general.rpartition(".")
    name, suffix = (ours[general], "") if general in ours else (ours[module], f".{leaf}")
    return name if isinstance(name, tuple) else (name,), suffix


def _entries(name: Name, suffix: str, path: str, shapes: Mapping[str, Shape]) -> tuple[Entry, ...]:
    """The entries of one parameter, whose name in the checkpoint is `name` and then `suffix`."""
    number = next(iter(re.findall(r"\.(\d+)\.", path)), "")
    key = (name if isinstance(name, str) else name.key).replace("*", number) + suffix
    if isinstance(name, str):
        return (Entry(key, path, _on_disk(path, shapes[path])),)
    if isinstance(name, Stacked):
        count, *shape_of_one = shapes[path]
        return tuple(Entry(key.replace("#", str(i)), path, tuple(shape_of_one), stacked=True) for i in range(count))
    if isinstance(name, Shaped):
        known = -math.prod(name.shape)
        shape = tuple(math.prod(shapes[path]) // known if n == -1 else n for n in name.shape)
        return (Entry(key, path, shape),)
    before, module, after = next((before, part, after) for before, part, after in _splits(path) if part in name.of)
    all_parts = [shapes[before + part + after] for part in name.of]
    take: tuple[slice, ...] = (slice(None),) * name.axis
    if name.by_head:  # [K, G queries + key + value, H, ...]
        heads, head_dim, *rest = all_parts[-1]
        counts = [shape[0] // heads for shape in all_parts]
        view, take = (heads, sum(counts), head_dim, *rest), (slice(None),)
        fused = (math.prod(view[:3]), *rest)
    else:
        flat = [_on_disk(path, shape) for shape in all_parts]
        counts = [shape[name.axis] for shape in flat]
        view = (*flat[0][: name.axis], sum(counts), *flat[0][name.axis + 1 :])
        view = fused = (*view[:-2], view[-1], view[-2]) if name.swapped else view
    begin = sum(counts[: name.of.index(module)])
    part = Part(view, (*take, slice(begin, begin + counts[name.of.index(module)])), name.swapped)
    return (Entry(key, path, fused, part),)


def _splits(path: str) -> Iterator[tuple[str, str, str]]:
    """The path, split into what is before a name, the name, and what is after it.

    The name is first that of the parameter, then that of its module, because `Fused.of` may have either.
    """
    before, dot, parameter = path.rpartition(".")
    yield before + dot, parameter, ""
    before, dot, module = before.rpartition(".")
    yield before + dot, module, f".{parameter}"


def _on_disk(path: str, shape: Shape) -> Shape:
    """The shape of a parameter in the checkpoint: heads and their channels are one axis."""
    axes, name = len(shape), path.split(".")
    if axes == 3 and ".".join(name[-2:]) == _JOINED:
        return (shape[0], shape[1] * shape[2])
    if name[-1] == "conv":  # weights of each channel, which a checkpoint has on an axis of their own
        return (shape[0] * shape[1], 1, shape[2])
    if name[-2:][0] in ("query", "key", "value", "out_gate") and axes == (3 if name[-1] == "weight" else 2):
        return (shape[0] * shape[1], *shape[2:])
    return shape
