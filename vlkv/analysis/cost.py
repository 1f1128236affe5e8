"""What a model computes and stores, from its config and the number of tokens per layer. Host side: numpy, exact.

A multiplication and an addition are two operations. Matrix products count; norms, softmax and activations do not.
Attention counts the whole square of a layer's tokens, masked half included, as profilers do.

LightKV's Table 1 (Sec. 4.2 says what is measured, not how): with the tower, logits of the whole prompt, 48 text tokens
and 100 new ones, the operations of the full caches agree within one percent, those of the methods that shorten the
prompt within six percent, except for three rows of the 7B models (`vlkv bench --preset lightkv-table-1`).

Axes: L layers.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Shaped

from vlkv.config import DecoderConfig
from vlkv.errors import InputError
from vlkv.towers.vit import VitConfig

Counts = Int[np.ndarray, " L"]


def prefill_flops(c: DecoderConfig, tokens: Counts) -> Counts:
    """Operations of every layer over the `tokens` that reach it (LightKV, Tables 1 and 6)."""
    tokens = np.asarray(tokens, np.int64)
    return tokens * _per_token(c) + 4 * tokens**2 * c.heads * c.head_dim


def decode_flops(c: DecoderConfig, entries: Counts) -> Counts:
    """Operations of every layer for one new token that attends to `entries`, its own included."""
    return _per_token(c) + 4 * np.asarray(entries, np.int64) * c.heads * c.head_dim


def logits_flops(c: DecoderConfig, tokens: int) -> int:
    """Operations of the output head for the logits of so many tokens."""
    return 2 * tokens * c.width * c.vocab_size


def tower_flops(c: VitConfig, width: int, images: int = 1, *, merge: int = 1) -> int:
    """Operations of the vision tower and a two-layer projector to the decoder's `width`.

    Args:
        c: the tower.
        width: the decoder's.
        images: pictures, tiles or frames, each a tower's whole input.
        merge: patches per side that become one vision token before they are projected (`wiring.merge`).

    Raises:
        InputError: a tower whose pictures have sizes of their own, or none at all.
    """
    if not isinstance(c, VitConfig):
        towers = ", ".join(kind.__name__ for kind in VitConfig.__subclasses__())
        raise InputError(f"tower_flops counts towers whose pictures all have one size ({towers}), "
                         f"not {type(c).__name__}; count the decoder alone with prefill_flops")  # fmt: skip
    patches = c.grid**2
    tokens = patches + c.class_token
    embedding = 2 * patches * 3 * c.patch_size**2 * c.width
    block = 2 * tokens * (4 * c.width**2 + 2 * c.width * c.mlp_width) + 4 * tokens**2 * c.width
    projector = 2 * (c.tokens * c.width * width + c.tokens // merge**2 * width**2)
    return images * (embedding + c.blocks * block + projector)


def cache_bytes(c: DecoderConfig, entries: Shaped[np.ndarray, " L"], itemsize: int) -> Shaped[np.ndarray, " L"]:
    """Bytes of the keys and values of every layer (LightKV, Tables 1 and 6), as they are before any quantisation.

    Args:
        c: the decoder.
        entries: of each layer, on average over its key heads.
        itemsize: bytes per number, 2 for bfloat16.
    """
    return np.asarray(entries) * (2 * c.kv_heads * c.head_dim * itemsize)


def _per_token(c: DecoderConfig) -> int:
    """Operations of one layer's weights for one token."""
    return 2 * c.width * (2 * c.heads * c.head_dim + 2 * c.kv_heads * c.head_dim + 3 * c.mlp_width)
