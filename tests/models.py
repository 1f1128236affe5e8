"""Tiny models with random weights, made without torch, and batches of rows with unequal lengths and images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

import vlkv
from vlkv.config import DecoderConfig, ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families import FAMILIES
from vlkv.families.llava import LlavaConfig
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
