"""Operations and bytes of a model, computed from its config and the number of tokens per layer; exact, with numpy.

A multiplication and an addition are two operations. Only matrix products are counted, not norms, softmax and
activations. Attention counts all pairs of a layer's tokens, including the masked half, as profilers do.

Comparison with LightKV's Table 1 (its Sec. 4.2 does not say how operations are counted): with the tower, the logits of
the whole prompt, 48 text tokens and 100 new ones, our counts for full caches agree within one percent. For methods that
shorten the prompt they agree within six percent, except in three rows of the 7B models
(`python -m benchmarks.papers.speed lightkv-table-1`).

Axes: L layers.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Shaped

from vlkv.config import DecoderConfig
from vlkv.errors import InputError
from vlkv.towers.vit import VitConfig

Counts = Int[np.ndarray, " L"]


def prefill_flops(c: DecoderConfig, tokens: Counts, reach: Counts | None = None) -> Counts:
    """Operations of every layer during prefill (LightKV, Tables 1 and 6).

    Args:
        c: the config of the decoder.
        tokens: number of tokens of each layer.
        reach: number of tokens that a query of each layer attends to; None: all.
    """
    tokens = np.asarray(tokens, np.int64)
    reach = tokens if reach is None else np.minimum(tokens, reach)
    return tokens * _per_token(c) + 4 * tokens * reach * c.heads * _heads(c)[1]


def decode_flops(c: DecoderConfig, entries: Counts) -> Counts:
    """Operations of every layer for one new token, from the number of entries that it attends to, including its own."""
    return _per_token(c) + 4 * np.asarray(entries, np.int64) * c.heads * _heads(c)[1]


def logits_flops(c: DecoderConfig, tokens: int) -> int:
    """Operations of the output head for the logits of `tokens` tokens."""
    return 2 * tokens * c.width * c.vocab_size


def tower_flops(c: VitConfig, width: int, images: int = 1, *, merge: int = 1) -> int:
    """Operations of the vision tower and of a projector with two layers.

    Args:
        c: the config of the tower.
        width: D, the width of the decoder.
        images: number of images, tiles or frames that the tower processes.
        merge: blocks of merge x merge patches become one vision token before the projector (`wiring.merge`).

    Raises:
        InputError: the images of this tower differ in size, or there is no tower.
    """
    if not isinstance(c, VitConfig):
        towers = ", ".join(kind.__name__ for kind in VitConfig.__subclasses__())
        raise InputError(f"tower_flops supports towers whose images all have one size ({towers}), "
                         f"not {type(c).__name__}; count the decoder alone with prefill_flops")  # fmt: skip
    patches = c.grid**2
    tokens = patches + c.class_token
    embedding = 2 * patches * 3 * c.patch_size**2 * c.width
    block = 2 * tokens * (4 * c.width**2 + 2 * c.width * c.mlp_width) + 4 * tokens**2 * c.width
    projector = 2 * (c.tokens * c.width * width + c.tokens // merge**2 * width**2)
    return images * (embedding + c.blocks * block + projector)


def cache_bytes(c: DecoderConfig, entries: Shaped[np.ndarray, " L"], itemsize: int) -> Shaped[np.ndarray, " L"]:
    """Bytes of the keys and values of every layer (LightKV, Tables 1 and 6), without quantisation.

    A layer that uses the keys and values of an earlier one has none.

    Args:
        c: the config of the decoder.
        entries: number of entries of each layer, mean over its key heads.
        itemsize: bytes per number; 2 for bfloat16.
    """
    own = [not kind.shared for kind in c.kinds]
    return np.asarray(entries) * (2 * _heads(c).prod(axis=0) * own * itemsize)


def _per_token(c: DecoderConfig) -> Counts:
    """Operations of every layer for one token, without attention between tokens. Only active experts compute."""
    e, (kv_heads, head_dim) = c.experts, _heads(c)
    mlp = np.array([3 * c.mlp_width_of(i) for i in range(c.layers)])
    if e is not None:
        mlp[list(e.layers)] += e.count + 3 * e.active * e.width
    extra = 0 if c.layer_inputs is None else 3 * c.layer_inputs.width
    products = [0 if kind.shared else 1 if c.key_is_value and kind.window is None else 2 for kind in c.kinds]
    return 2 * c.width * (2 * c.heads * head_dim + np.array(products) * kv_heads * head_dim + mlp + extra)


def _heads(c: DecoderConfig) -> Int[np.ndarray, "2 L"]:
    """K and H of every layer."""
    return np.array([c.heads_of(kind) for kind in c.kinds]).T
