"""Tiny models with random weights, made without torch, and batches of rows with unequal lengths and images."""

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

import vlkv
from vlkv import policies
from vlkv.compression import budgets
from vlkv.compression.policy import Facts
from vlkv.config import DecoderConfig, ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families import FAMILIES
from vlkv.families.llava import LlavaConfig
from vlkv.mini import CHECKPOINT
from vlkv.towers.vit import ClipConfig

IMAGE_TOKEN = 5
CONFIG = LlavaConfig(
    family="llava",
    decoder=DecoderConfig(
        vocab_size=50, width=32, mlp_width=48, layers=3, heads=4, kv_heads=2, head_dim=8, norm_eps=1e-6,
        max_positions=512, qkv_bias=True,
    ),
    vision=ClipConfig(
        width=16, mlp_width=24, layers=2, heads=2, image_size=20, patch_size=4, norm_eps=1e-5, feature_layer=-2,
        keep_class_token=False,
    ),
    image_token=IMAGE_TOKEN,
    stop=(2,),
)  # fmt: skip
SMALL = dataclasses.replace(CONFIG, decoder=dataclasses.replace(CONFIG.decoder, layers=2))


class Drawn(Initializer):
    """Draws all parameters with numpy, which compiles nothing; adds noise to constant ones too."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float) -> nnx.Param:
        return self.constant(0.0, *shape, spread=np.hypot(scale, 0.2))

    def constant(self, value: float, *shape: int, spread: float = 0.2) -> nnx.Param:
        return nnx.Param(jax.device_put((value + spread * self.rng.normal(size=shape)).astype(np.float32)))


def random_model(config: ModelConfig, seed: int = 0):
    """A model with all parameters random, and weights large enough that attention is far from uniform."""
    return FAMILIES[config.family].model(config, init=Drawn(seed))


def tiny_llava(seed: int = 0, config: ModelConfig = CONFIG):
    """The model that most tests use."""
    return random_model(config, seed)


def same(ours, theirs, atol: float = 0.0) -> None:
    """Asserts that two pytrees are equal, up to `atol`, with the same dtypes and static parts."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=atol)


@jax.jit
def embed(params, inputs: vlkv.Inputs):
    """The input of the first layer."""
    return params.embed(inputs).x


def padded(rows, padding: str | Sequence[str] = "right") -> dict[str, np.ndarray]:
    """Token ids and attention mask of rows, padded on one side ("left" or "right"), or on one side for each row."""
    sides = [padding] * len(rows) if isinstance(padding, str) else padding
    longest = max(map(len, rows))
    ids, mask = np.zeros((2, len(rows), longest), int)
    for i, (row, side) in enumerate(zip(rows, sides, strict=True)):
        start = longest - len(row) if side == "left" else 0
        ids[i, start : start + len(row)], mask[i, start : start + len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def unequal_batch(config: ModelConfig = CONFIG, seed: int = 0, padding: str = "right") -> vlkv.Inputs:
    """Rows with two images, one image, and none; an image has 25 vision tokens."""
    rng = np.random.default_rng(seed)
    image = [IMAGE_TOKEN] * 25
    rows = [
        [1, *rng.integers(6, 50, 5), *image, 8, *image, *rng.integers(6, 50, 7)],
        [1, *rng.integers(6, 50, 3), *image, *rng.integers(6, 50, 14)],
        [1, *rng.integers(6, 50, 11)],
    ]
    pixels = rng.normal(size=(3, 3, 20, 20)).astype(np.float32)
    return vlkv.Inputs.from_hf({**padded(rows, padding), "pixel_values": pixels}, config)


RATIO = 10


class Uneven(policies.SnapKV):
    """Every other head gets ten times the budget of its neighbour."""

    facts = Facts(
        budgets="heads",
    )

    def statistics(self, obs, scores):
        del obs
        return {"weight": jnp.where(jnp.arange(len(scores)) % 2 == 0, 1.0, RATIO)}

    def allocate(self, statistics, *, total, most, layers):
        weight, heads = statistics["weight"], statistics["weight"].shape[1]
        real = heads * total * weight / jnp.sum(weight)
        ceiling = jnp.broadcast_to(most[:, None], weight.shape).reshape(-1)
        return budgets.apportion(real.reshape(-1), heads * total, floor=0, ceiling=ceiling).reshape(layers, heads)


def cut(folder: Path, *, layers: int, grid: int) -> Path:
    """Writes a checkpoint with the first layers of decoder and tower, for images of `grid` x `grid` patches."""
    shutil.copytree(CHECKPOINT, folder)
    raw = json.loads((folder / "config.json").read_text())
    vision, patches = raw["vision_config"], grid**2
    before, vision["image_size"] = vision["image_size"], grid * vision["patch_size"]
    raw["text_config"]["num_hidden_layers"], vision["num_hidden_layers"] = layers, 2
    raw["image_seq_length"] = patches
    (folder / "config.json").write_text(json.dumps(raw))
    for path in folder.glob("*processor_config.json"):
        path.write_text(re.sub(rf"\b{before}\b", str(vision["image_size"]), path.read_text()))

    def is_kept(name: str) -> bool:
        number = re.search(r"layers\.(\d+)\.", name)
        return number is None or int(number[1]) < (2 if "vision" in name else layers)

    tensors = {name: x for name, x in load_file(folder / "model.safetensors").items() if is_kept(name)}
    for name in tensors:
        if name.endswith("position_embedding.weight"):  # the first is that of the class token
            tensors[name] = tensors[name][: patches + 1].copy()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
