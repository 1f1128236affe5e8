"""The model of a benchmark, the grid of measurements (policy x keep x batch x prompt length), and random prompts.

A model is a published size with random weights, a checkpoint folder, or the demo model.

Prompts need no processor, because timing depends only on shapes. Vision tokens come first, on square grids, and text
last, as in the papers' measurements. The vision tower does not run: vision tokens are embedded like text, which does
not change shapes. The tower has the same cost with every policy, except for the attention that FasterVLM, HiRED and
IVTP use; here it is zero.

Axes: B batch · T prompt · V vision tokens · S new tokens · L layers · A position axes.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from checkpoints_convert import packaged
from vlkv import loading
from vlkv.analysis.cost import row_bytes, tree_bytes
from vlkv.compression.checking import require_layers
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.families import Model, abstract, config_from_hf, init, presets
from vlkv.families.folders import read_config
from vlkv.files import require_json
from vlkv.inputs import Inputs
from vlkv.mini import CHECKPOINT
from vlkv.policies import Full, Policy, text_of
from vlkv.tools.benching.machine import memory_bytes

IMAGE = 576  # vision tokens of one image, 24 x 24; the rest of a prompt is a smaller image


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """One prompt length and batch size. All policies of a setting are measured alternately."""

    batch: int
    prompt: int  # tokens of a row
    text: int  # text tokens, at the end of the row; the others are vision tokens
    new: int  # generated tokens

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "new", "text"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.new < 2:
            raise InputError(f"new={self.new} must be at least 2: the first token belongs to the prefill")
        if self.text > self.prompt:
            raise InputError(f"text={self.text} must not exceed the prompt of {self.prompt} tokens")

    @property
    def vision(self) -> int:
        """Vision tokens of a row."""
        return self.prompt - self.text

    @property
    def size(self) -> int:
        """Entries of the full cache, by which settings are sorted."""
        return self.batch * (self.prompt + self.new)


def grid(config: ModelConfig, *, batches: Iterable[int], prompts: Iterable[int], text: int, new: int) -> list[Setting]:
    """All settings, the smallest first. The prompt of a text model is all text."""
    sizes = itertools.product(batches, prompts)
    settings = {Setting(batch, prompt, prompt if config.vision is None else text, new) for batch, prompt in sizes}
    return sorted(settings, key=lambda setting: setting.size)


def check_policy(policy: Policy, config: ModelConfig) -> None:
    """Raises InputError if a policy cannot be measured on this model. Called before anything is compiled."""
    name = type(policy).__name__
    require_layers(policy, config.decoder.full_layers)
    if config.vision is None and policy.scope == "vision" and policy.facts.selects:
        raise InputError(f"{name} compresses vision tokens, but {config.family} has none: use --scope all")


def cache_bytes(policy: Policy, config: ModelConfig, setting: Setting, itemsize: int) -> float:
    """Bytes of the allocated cache of all rows, without the arrays that say which token is where."""
    bounds = {"vision": setting.vision, "text": setting.text, "images": images_of(setting.vision)}
    return setting.batch * row_bytes(policy, config.decoder, itemsize, new_tokens=setting.new, **bounds)


_NUMBERS = re.compile(r"\([-+\d\s.,()e]{80,}\)")


def label(policy: Policy) -> str:
    """The name of a policy in tables, without long lists of numbers, such as the weights of a kernel."""

    def short(numbers: re.Match[str]) -> str:
        opened = numbers[0].count("(") - numbers[0].count(")")
        return "(" * opened + "(...)" + ")" * -opened

    return "full cache" if policy == Full() else _NUMBERS.sub(short, text_of(policy, scope=True))


def with_full(contestants: Sequence[Policy]) -> list[Policy]:
    """The full cache first, and each policy once."""
    return list(dict.fromkeys([Full(), *contestants]))


def images_of(vision: int) -> int:
    """Number of images for `vision` tokens."""
    return -(-vision // IMAGE)


def make_inputs(config: ModelConfig, batch: int, prompt: int, vision: int, *, seed: int = 0) -> Inputs:
    """Rows of `prompt` tokens: `vision` vision tokens, then text. `seed` is for the token ids."""
    place = np.arange(prompt)
    is_vision = place < vision
    tokens = np.random.default_rng(seed).integers(0, config.decoder.vocab_size, (batch, prompt), np.int32)
    index = np.where(is_vision, np.arange(batch)[:, None] * vision + place, -1).astype(np.int32)
    return Inputs(
        tokens=tokens,
        positions=np.broadcast_to(place[None, :, None], (batch, prompt, config.decoder.rope.position_axes)).astype(
            np.int32
        ),
        valid=np.ones((batch, prompt), bool),
        vision_index=index,
        grid=np.broadcast_to(_grid(prompt, vision), (batch, prompt, 3)).copy(),
        pixels=None,
        max_vision=vision,
        max_text=prompt - vision,
        max_instruction=prompt - vision,
        max_images=images_of(vision),
    )


def _grid(prompt: int, vision: int) -> np.ndarray:
    """[T, 3]: image, line and column of every vision token; -1 for text."""
    grid = np.full((prompt, 3), -1, np.int32)
    image, place = np.divmod(np.arange(vision), IMAGE)
    last = vision % IMAGE  # tokens of the smaller image
    side = np.where((image == vision // IMAGE) & (last > 0), max(1, math.isqrt(last)), math.isqrt(IMAGE))
    grid[:vision] = np.stack([image, place // side, place % side], axis=1)
    return grid


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


def find(name: str, *, dtype: DTypeLike | None = None) -> Subject:
    """A preset's name, "mini", "tiny" (random weights, for dry runs), a checkpoint folder or a hub id.

    Raises:
        InputError: none of these.
    """
    fast = "float32" if jax.default_backend() == "cpu" else "bfloat16"  # on a CPU, bfloat16 is slow
    kind = jnp.dtype(fast if dtype is None else dtype)
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
