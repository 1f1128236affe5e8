"""The table of all model families, and functions that make configs and models with it.

`init` makes a model with random weights, and `abstract` only the shapes of its weights:

params = vlkv.init(vlkv.presets["llava-1.5-7b"], jax.random.key(0), mesh, dtype=jnp.bfloat16)
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from vlkv import sharding
from vlkv.config import ModelConfig, Raw, filled
from vlkv.decoder.layers import Initializer, Shapes
from vlkv.errors import InputError, suggestion
from vlkv.families.decoders.kinds import read_stop, text_part
from vlkv.families.family import Family, TextModel
from vlkv.files import DATA, class_defaults
from vlkv.inputs import required_key
from vlkv.processing.host import HostConfig

Model: TypeAlias = TextModel

# The modules of this package that are families; a new family adds its name here. Each has a table `FAMILIES`, from
# `model_type` to a `Family`.
_NAMES = "llava llava_next internvl qwen2_vl glm smolvlm gemma3 gemma4 paddleocr_vl qwen_vl eve text"
_MODULES = [importlib.import_module(f"vlkv.families.{name}") for name in _NAMES.split()]
FAMILIES: dict[str, Family] = {kind: family for module in _MODULES for kind, family in module.FAMILIES.items()}
# Fields of `generation_config.json` that change answers in transformers -> the default. Others are about stop tokens,
# padding, outputs and caches, or matter only together with one of these.
GENERATION: Raw = class_defaults("generation_config")


def config_from_hf(raw: Raw, generation: Raw | None = None, added: Mapping[str, int] | None = None) -> HostConfig:
    """The config in a `config.json` and, if there is one, `generation_config.json` (stop ids, how tokens are chosen).

    `added`: added tokens of the tokenizer -> their ids, for families whose config does not contain these ids. Raises
    InputError for an unsupported `model_type` or field.
    """
    kind = model_type(raw)
    if raw.get("quantization_config"):
        raise InputError("config.json: quantization_config: quantised checkpoints are not supported; "
                         "use the original weights")  # fmt: skip
    if raw.get("transformers_weights"):
        raise InputError("config.json: transformers_weights is not supported; name the file model.safetensors")
    other_files = {"generation_config": generation or {}, "added_tokens": added or raw.get("added_tokens") or {}}
    raw = {**raw, **other_files, "model_type": kind}
    family = FAMILIES[kind].config
    # As in transformers, these settings are read from `config.json` only if there is no `generation_config.json`.
    settings = read_generation(filled(raw, text_part(raw)) if generation is None else generation)
    return family(family=kind, **{"stop": read_stop(raw), "generation": settings, **family.read(raw)})


def read_generation(raw: Raw) -> tuple[tuple[str, Any], ...]:
    """The fields of `GENERATION` that are neither null nor the default, with tuples in place of lists."""
    fields = {name: _hashable(raw[name]) for name in GENERATION if raw.get(name) is not None}
    return tuple((name, value) for name, value in fields.items() if value != GENERATION[name])


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _hashable(item)) for name, item in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def model_type(raw: Raw) -> str:
    """The key in `FAMILIES` of a `config.json`; InputError if there is none.

    Checkpoints in their authors' form may have the `model_type` of another family, so `Family.claims` is asked first.
    """
    architectures = raw.get("architectures") or ()
    if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
        raise InputError(f"config.json: architectures={architectures!r} must be a list of names")
    claimed = (kind for kind, family in FAMILIES.items() if family.claims is not None and family.claims(raw))
    kind = next(claimed, raw.get("model_type"))
    if kind not in list(FAMILIES):  # a list, because the value may be of a type that cannot be hashed
        raise InputError(f"config.json: model_type={kind!r} is not supported (supported: {', '.join(FAMILIES)})")
    return kind


def init(config: ModelConfig, key: PRNGKeyArray, mesh: Mesh | None = None, *, dtype: DTypeLike = jnp.float32) -> Model:
    """A model with random weights, for training and for timing.

    Args:
        config: its sizes, from a folder or from `vlkv.presets`.
        key: the weights follow from it alone and are the same on every mesh.
        mesh: each weight is made on its own devices of this mesh, placed as by `load`; None: the default device.
        dtype: of the weights.
    """
    key = required_key(key)
    model = FAMILIES[config.family].model
    if mesh is None:
        return model(config, init=Initializer(key, dtype))
    # The shardings must be known before the weights are made. So a first model has shapes only: its leaves have paths,
    # which determine the shardings, and `Shapes.parameters` has the order in which the second model makes its weights.
    shapes = Shapes(dtype)
    leaves = jax.tree_util.tree_flatten_with_path(model(config, init=shapes))[0]
    shardings = {id(leaf): sharding.where(sharding.path_name(keypath), leaf.shape, mesh) for keypath, leaf in leaves}
    return model(config, init=Initializer(key, dtype, [shardings[id(shape)] for shape in shapes.parameters]))


def abstract(config: ModelConfig, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None) -> Model:
    """`init` with ShapeDtypeStructs in place of arrays, with shardings if a mesh is given; allocates nothing."""
    shapes = FAMILIES[config.family].model(config, init=Shapes(dtype))
    if mesh is None:
        return shapes

    def with_sharding(keypath: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        placement = sharding.where(sharding.path_name(keypath), x.shape, mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement)

    return jax.tree_util.tree_map_with_path(with_sharding, shapes)


def shapes_by_path(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters, by paths such as `decoder.layers.0.query.weight`."""
    leaves = jax.tree_util.tree_flatten_with_path(abstract(config))[0]
    return {sharding.path_name(keypath): tuple(leaf.shape) for keypath, leaf in leaves}


class Presets(Mapping[str, HostConfig]):
    """Configs of published models by name, for planning and timing without weights. Each is made when it is read."""

    @functools.cached_property
    def raw(self) -> dict[str, dict[str, Any]]:
        """The fields of each `config.json` that matter, from the files of `vlkv/data/published`."""
        files = sorted((DATA / "published").glob("*.json"))
        return {name: fields for file in files for name, fields in json.loads(file.read_text()).items()}

    def __getitem__(self, name: str) -> HostConfig:
        """The config; InputError for an unknown name."""
        raw = self.raw
        if name not in raw:
            hint = suggestion(str(name), raw, f"there are: {', '.join(raw)}")
            raise InputError(f"no preset {name!r}: {hint}")
        return config_from_hf(raw[name])

    def __contains__(self, name: object) -> bool:
        return name in self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


presets = Presets()
