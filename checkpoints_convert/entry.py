"""Which tensor of a checkpoint is which of our parameters.

A family names our modules and theirs; everything else follows from the shapes of our parameters. Weights of heads have
an axis for the heads, which theirs do not have, and several of our parameters may share a fused tensor.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Shape = tuple[int, ...]
# Leaves of the last two axes that a checkpoint has as one; of all other heads it is the first two.
_JOINED = "out.weight"
HEAD = "decoder.head.weight"  # whether a model has one of its own the checkpoint decides, not its config


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a tensor that several of our parameters share: reshape to `view`, then take the slices."""

    view: Shape
    take: tuple[slice, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """The piece."""
        return array.reshape(self.view)[self.take]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our parameters: its tensor's name on disk (new style) and shape there, and its path in our tree.

    Where several parameters share a tensor (fused projections), each has an entry with the same key and its part.
    """

    key: str
    path: str
    shape: Shape
    part: Part | None = None


@dataclasses.dataclass(frozen=True)
class Fused:
    """A tensor that holds several of our modules: their rows one after another.

    Attributes:
        key: its name.
        of: the last names of our modules in it, in order.
        by_head: for each key head its queries, its key, its value, and so on for the next.
    """

    key: str
    of: tuple[str, ...] = ("query", "key", "value")
    by_head: bool = False


@dataclasses.dataclass(frozen=True)
class Shaped:
    """A tensor whose shape on disk has other axes than ours; -1 stands for what follows from the rest."""

    key: str
    shape: Shape


Name = str | Fused | Shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """How a family's checkpoints name what it needs.

    Attributes:
        ours: path of our module or parameter -> its name on disk; `*` is the number of a layer. A module's weight and
            bias follow its name.
        renames: what older names become, by regular expression, before they are looked up.
        unused: keys that are known and not needed, by regular expression.
        blocks: a number that `unused` captures means the block of a tower, and those from this one on are unused.
        tower: the tensors of a tower that a checkpoint may only name: the folder beside, and their prefix.
    """

    ours: Mapping[str, Name]
    renames: tuple[tuple[str, str], ...] = ()
    unused: str = r"(?!)"
    blocks: int = 0
    tower: tuple[str, str] | None = None

    def canonical(self, key: str) -> str:
        """The new-style name of a key found on disk."""
        for pattern, replacement in self.renames:
            key = re.sub(pattern, replacement, key)
        return key

    def ignores(self, key: str) -> bool:
        """Whether a (new-style) key is known but unused; buffers of old checkpoints are, in every family."""
        found = re.search(self.unused, key)
        block = found.groups()[0] if found and found.groups() else None
        unused = found is not None and (block is None or int(block) >= self.blocks)
        return unused or re.search(r"(rotary_emb\.inv_freq|position_ids)$", key) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """All that the engine must know of one checkpoint folder.

    Attributes:
        family: for messages and the manifest.
        config: `config.json` as the converted folder is to have it.
        names: of its tensors.
        shapes: of our parameters by path; worked out when asked for.
        special: tokens whose ids follow those of a tiktoken file.
    """

    family: str
    config: Mapping[str, Any]
    names: Names
    shapes: Callable[[], Mapping[str, Shape]]
    special: tuple[str, ...] = ()


def make_entries(names: Names, shapes: Mapping[str, Shape]) -> tuple[Entry, ...]:
    """One entry for each of our parameters."""
    return tuple(_entry(names.ours, path, shapes) for path in shapes)


def _entry(ours: Mapping[str, Name], path: str, shapes: Mapping[str, Shape]) -> Entry:
    number = next(iter(re.findall(r"\.(\d+)\.", path)), "")
    general = re.sub(r"\.\d+\.", ".*.", path)
    module, _, leaf = general.rpartition(".")
    name, suffix = (ours[general], "") if general in ours else (ours[module], f".{leaf}")
    if isinstance(name, str):
        return Entry(name.replace("*", number) + suffix, path, _on_disk(path, shapes[path]))
    key = name.key.replace("*", number) + suffix
    if isinstance(name, Shaped):
        known = -math.prod(name.shape)
        shape = tuple(math.prod(shapes[path]) // known if n == -1 else n for n in name.shape)
        return Entry(key, path, shape)
    *parent, own, leaf = path.split(".")
    all_parts = [shapes[".".join((*parent, one, leaf))] for one in name.of]
    take: tuple[slice, ...] = ()
    if name.by_head:  # [K, G queries + key + value, H, ...]
        heads, head_dim, *rest = shapes[".".join((*parent, "key", leaf))]
        counts = [shape[0] // heads for shape in all_parts]
        view, take = (heads, sum(counts), head_dim, *rest), (slice(None),)
        fused = (math.prod(view[:3]), *rest)
    else:
        flat = [_on_disk(path, shape) for shape in all_parts]
        counts = [shape[0] for shape in flat]
        view = fused = (sum(counts), *flat[0][1:])
    first = sum(counts[: name.of.index(own)])
    return Entry(key, path, fused, Part(view, (*take, slice(first, first + counts[name.of.index(own)]))))


def _on_disk(path: str, shape: Shape) -> Shape:
    """The shape of our parameter with the heads and their channels in one axis, as checkpoints have it."""
    kind, name = len(shape), path.split(".")
    if kind == 3 and ".".join(name[-2:]) == _JOINED:
        return (shape[0], shape[1] * shape[2])
    if name[-2:][0] in ("query", "key", "value") and kind == (3 if name[-1] == "weight" else 2):
        return (shape[0] * shape[1], *shape[2:])
    return shape
