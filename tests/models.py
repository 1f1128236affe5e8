"""Tiny models with random weights, made without torch, and batches whose rows are unequal in every way."""

from __future__ import annotations

import jax
import numpy as np

import vlkv
from vlkv.config import DecoderConfig, ModelConfig
from vlkv.families.llava.config import LlavaConfig
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


def tiny_llava(seed: int = 0, config: ModelConfig = CONFIG):
    """Every parameter random and queries large, so that attention is peaked."""
    params = vlkv.init(config, jax.random.key(seed))
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    leaves = [leaf + 0.2 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, leaves)


def unequal_batch(config: ModelConfig = CONFIG, seed: int = 0, padding: str = "right") -> vlkv.Inputs:
    """Rows with two images, one image, and none; 25 vision tokens an image."""
    rng = np.random.default_rng(seed)
    image = [IMAGE_TOKEN] * 25
    rows = [
        [1, *rng.integers(6, 50, 5), *image, 8, *image, *rng.integers(6, 50, 7)],
        [1, *rng.integers(6, 50, 3), *image, *rng.integers(6, 50, 14)],
        [1, *rng.integers(6, 50, 11)],
    ]
    longest = max(map(len, rows))
    pads = [(longest - len(row), 0) if padding == "left" else (0, longest - len(row)) for row in rows]
    batch = {
        "input_ids": np.stack([np.pad(row, pad) for row, pad in zip(rows, pads, strict=True)]),
        "attention_mask": np.stack([np.pad(np.ones(len(row), int), pad) for row, pad in zip(rows, pads, strict=True)]),
        "pixel_values": rng.normal(size=(3, 3, 20, 20)).astype(np.float32),
    }
    return vlkv.Inputs.from_hf(batch, config)
