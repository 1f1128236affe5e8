"""The model of a benchmark: a published size with random weights, a checkpoint folder, or the demo model."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from checkpoints_convert import packaged
from vlkv import loading
from vlkv.analysis.cost import tree_bytes
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.families import Model, abstract, config_from_hf, init, presets
from vlkv.families.folders import read_config
from vlkv.files import require_json
from vlkv.mini import CHECKPOINT
from vlkv.tools.benching.machine import memory_bytes


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that is made or loaded later, after all other checks."""

    name: str
    config: ModelConfig
    dtype: jnp.dtype
    folder: Path | None  # None: random weights
    mesh: Mesh | None = None  # None: one device

    @functools.cached_property
    def shapes(self) -> Model:
        """The parameters as shapes."""
        return abstract(self.config, self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        return tree_bytes(self.shapes)

    def check_fits(self) -> None:
        """Raises InputError if the weights exceed the memory of the device."""
        memory = memory_bytes()
        parts = 1 if self.mesh is None else self.mesh.shape["model"]
        if memory is not None and self.bytes > memory * parts:
            raise InputError(
                f"{self.name}: the weights need {self.bytes / 2**30:.1f} GiB in {self.dtype.name}, the device has "
                f"{memory / 2**30:.1f}: choose a smaller model or --dtype bfloat16"
            )

    def params(self, seed: int = 0) -> Model:
        """The parameters, loaded or random."""
        self.check_fits()
        if self.folder is not None:
            return loading.load_params(self.folder, dtype=self.dtype, mesh=self.mesh)
        return init(self.config, jax.random.key(seed), self.mesh, dtype=self.dtype)


def default_dtype() -> str:
    """The dtype of benchmarks: bfloat16, or float32 on a CPU, where bfloat16 is slow."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def find(name: str, *, dtype: DTypeLike | None = None) -> Subject:
    """A preset's name, "mini", "tiny" (random weights, for dry runs), a checkpoint folder or a hub id.

    Raises:
        InputError: none of these.
    """
    kind = jnp.dtype(default_dtype() if dtype is None else dtype)
    if name == "tiny" or name in presets:
        return Subject(name, _tiny() if name == "tiny" else presets[name], kind, None)
    if name == "mini":
        return Subject(name, read_config(CHECKPOINT), kind, CHECKPOINT)
    if "/" not in name and name not in packaged.CHECKPOINTS and not Path(name).exists():
        presets[name]  # raises an error that lists the names
    folder = loading.resolve(name)
    return Subject(folder.resolve().name, read_config(folder), kind, folder)


def _tiny() -> ModelConfig:
    """The demo model's config with smaller sizes, which compiles in seconds, for dry runs and tests."""
    raw = require_json(CHECKPOINT / "config.json")
    text = {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, "num_attention_heads": 4}
    text |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    parts = {"text_config": raw["text_config"] | text, "vision_config": raw["vision_config"] | vision}
    return config_from_hf({**raw, **parts})
