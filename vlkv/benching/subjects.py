"""Which model is timed: a published size with random weights, a checkpoint folder, or the miniature."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from checkpoints_convert import reading
from vlkv import loading, models
from vlkv.benching.machine import memory_bytes
from vlkv.benching.settings import tree_bytes
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.mini import CHECKPOINT
from vlkv.presets import presets


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that can be made or loaded once everything else is known to be right."""

    name: str
    config: ModelConfig
    dtype: jnp.dtype
    folder: Path | None  # None: random weights

    @functools.cached_property
    def shapes(self) -> models.Model:
        """The parameters as shapes."""
        return models.abstract(self.config, self.dtype)

    @property
    def bytes(self) -> int:
        """Of the weights."""
        return tree_bytes(self.shapes)

    def params(self, seed: int = 0) -> models.Model:
        """The parameters themselves.

        Raises:
            InputError: they alone are more than the device holds.
        """
        room = memory_bytes()
        if room is not None and self.bytes > room:
            raise InputError(
                f"{self.name}: the weights need {self.bytes / 2**30:.1f} GiB in {self.dtype.name}, the device has "
                f"{room / 2**30:.1f}: choose a smaller model or --dtype bfloat16"
            )
        if self.folder is not None:
            return loading.load_params(self.folder, dtype=self.dtype)
        return models.init(self.config, jax.random.key(seed), dtype=self.dtype)


def default_dtype() -> str:
    """What a benchmark computes in: bfloat16 is slow on a CPU."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def find(name: str, *, dtype: DTypeLike | None = None) -> Subject:
    """A preset's name, "mini", a checkpoint folder or a hub id.

    Raises:
        InputError: none of these.
    """
    kind = jnp.dtype(default_dtype() if dtype is None else dtype)
    if name in presets:
        return Subject(name, presets[name], kind, None)
    if name == "mini":
        return Subject(name, reading.read_config(CHECKPOINT), kind, CHECKPOINT)
    if "/" not in name and not Path(name).exists():
        presets[name]  # says which names there are, and the nearest
    folder = loading.resolve(name)
    return Subject(folder.resolve().name, reading.read_config(folder), kind, folder)
