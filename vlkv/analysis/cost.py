"""Operations and bytes of a model, its cache and its weights, computed from configs and shapes; exact, with numpy.

A multiplication and an addition are two operations. Only matrix products are counted, not norms, softmax and
activations. Attention counts all pairs of a layer's tokens, including the masked half, as profilers do.

Comparison with LightKV's Table 1 (its Sec. 4.2 does not say how operations are counted): with the tower, the logits of
the whole prompt, 48 text tokens and 100 new ones, our counts for full caches agree within one percent. For methods that
reduce the prompt they agree within six percent, except in three rows of the 7B models
(`python -m benchmarks.papers.speed lightkv-table-1`).

Axes: L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jaxtyping import Bool, Int, Shaped

from vlkv import sharding
from vlkv.cache.parts import slot_parts
from vlkv.compression.policy import Policy
from vlkv.compression.sizes import cache_spec, total_bound, vision_bounds
from vlkv.config import DecoderConfig, LayerKind, ModelConfig
from vlkv.errors import InputError
from vlkv.families import shapes_by_path
from vlkv.towers.vit import VitConfig

Counts = Int[np.ndarray, " L"]
_LANES, _LINES, _WORD = 128, 8, 4  # of a TPU: numbers of a line, lines of a tile, bytes of a word


def prefill_flops(c: DecoderConfig, tokens: Counts, reach: Counts | None = None) -> Counts:
    """Operations of every layer during prefill (LightKV, Tables 1 and 6), from its number of tokens.

    `reach` is the number of tokens that a query of each layer attends to; None: all.
    """
    tokens = np.asarray(tokens, np.int64)
    reach = tokens if reach is None else np.minimum(tokens, reach)
    return tokens * _per_token(c) + 4 * tokens * reach * c.heads * _heads(c)[1] * _attends(c)


def decode_flops(c: DecoderConfig, entries: Counts) -> Counts:
    """Operations of every layer for one new token, from the number of entries that it attends to, including its own."""
    return _per_token(c) + 4 * np.asarray(entries, np.int64) * c.heads * _heads(c)[1] * _attends(c)


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
        supported = f"tower_flops supports towers whose images all have one size ({towers})"
        raise InputError(f"{supported}, not {type(c).__name__}; count the decoder alone with prefill_flops")
    patches = c.grid**2
    tokens = patches + c.class_token
    embedding = 2 * patches * 3 * c.patch_size**2 * c.width
    block = 2 * tokens * (4 * c.width**2 + 2 * c.width * c.mlp_width) + 4 * tokens**2 * c.width
    projector = 2 * (c.tokens * c.width * width + c.tokens // merge**2 * width**2)
    return images * (embedding + c.blocks * block + projector)


def any_tower_flops(config: ModelConfig, pixels: tuple[int, ...]) -> float:
    """Approximate operations of any tower on pixels of this shape: each weight once per patch, and attention."""
    c = config.vision
    if c is None:
        return 0.0
    weights = sum(math.prod(shape) for path, shape in _weights(config).items() if path.startswith("vision."))
    patches = c.patches(pixels)
    return pixels[0] * (2.0 * weights * patches + 4.0 * patches**2 * c.width * c.blocks)


def job(config: ModelConfig, policy: Policy, vision: int, text: int, new: int) -> dict[str, float]:
    """Teraflops of a whole job on one row, with tower and all logits, and bytes of the cache at its end in bfloat16."""
    c = config.decoder
    prompt = np.array(vision_bounds(policy, layers=c.full_layers, vision=vision, images=1)) + text
    total = total_bound(policy, layers=c.full_layers, vision=vision, text=text)
    held = np.array([total // c.layers + (i < total % c.layers) for i in range(c.layers)])  # the cost is linear in them
    flops = prefill_flops(c, prompt).sum() + logits_flops(c, int(prompt[-1]) + new - 1)
    if config.vision is not None:
        merge = getattr(config.wiring, "merge", 1)
        each = config.vision.tokens // merge**2
        cut = vision > each and vision % each > 0  # padding was cut: one tile more ran than they fill
        flops += tower_flops(config.vision, c.width, -(-vision // each) + cut, merge=merge)
    flops += sum(decode_flops(c, held + i).sum() for i in range(1, new))
    return {"teraflops": float(flops / 1e12), "cache_bytes": float(cache_bytes(c, held + new, 2).sum())}


# --- bytes of the cache -----------------------------------------------------------------------------------------------


def cache_bytes(c: DecoderConfig, entries: Shaped[np.ndarray, " L"], itemsize: int) -> Shaped[np.ndarray, " L"]:
    """Bytes of the keys and values of every layer (LightKV, Tables 1 and 6), without quantisation.

    A recurrent layer has none (`state_bytes`), and neither has a layer that uses those of an earlier one. `entries` is
    the mean over a layer's key heads, `itemsize` the bytes per number: 2 for bfloat16.
    """
    stores = _attends(c) & np.array([not kind.shared for kind in c.kinds])
    return np.asarray(entries) * (2 * _heads(c).prod(axis=0) * stores * itemsize)


def state_bytes(c: DecoderConfig, itemsize: int, model: int = 1) -> int:
    """Bytes of the states of all recurrent layers for one row, on `model` chips together.

    The inputs of convolutions have `itemsize` bytes per number, the memory is in float32. If the chips do not divide
    the heads, each has all.
    """
    r = c.recurrent
    if r is None:
        return 0
    keys, values = (heads * (1 if heads % model == 0 else model) for heads in (r.key_heads, r.heads))
    newest = (r.taps - 1) * (2 * keys * r.key_dim + values * r.value_dim)
    return len(r.layers) * (4 * values * r.key_dim * r.value_dim + itemsize * newest)


def row_bytes(policy: Policy, c: DecoderConfig, itemsize: int, model: int = 1, **bounds: int) -> float:
    """Bytes of one row's keys and values in pool, tails and rings, and of its states, on `model` chips together.

    Without tile padding. A quantised pool has scales too (`CacheSpec.pool_bytes`).

    Args:
        policy: determines how many entries are allocated.
        c: the config of the decoder.
        itemsize: bytes per number that is not quantised.
        model: chips that share the heads, or the slots; if they do not divide the key heads of rings, each has all.
        bounds: of the row, as in `cache_spec`: `vision`, `text` and `new_tokens`, and where needed the others.
    """
    spec = cache_spec(policy, layers=c.full_layers, windows=c.sliding, **bounds)
    parts = slot_parts(spec.columns(c.kv_heads), model)
    in_tail: float = itemsize
    if spec.storage is not None and spec.storage.tail:
        in_tail = spec.storage.bytes_per_number(itemsize, c.head_dim)
    pool = spec.pool_bytes(c.head_dim, itemsize, parts)
    tail = 2 * spec.layers * spec.tail(parts) * c.head_dim * in_tail
    heads, channels = c.sliding_heads or (c.kv_heads, c.head_dim)
    rings = heads * channels * sum(spec.rings) * itemsize * (1 if heads % model == 0 else model)
    return c.kv_heads * (pool + tail) + 2 * rings + state_bytes(c, itemsize, model)


def cache_parts(cache: Any, platform: str) -> dict[str, int]:
    """Bytes on one chip of a cache's parts: `pool`, `tail`, `rings`, `states`, and `index`, which locates entries."""
    parts = {name: chip_bytes(arrays, platform) for name, arrays in cache.kept.items()}
    return {**parts, "index": chip_bytes(cache, platform) - sum(parts.values())}


def read_of_cache(kinds: Sequence[LayerKind], parts: dict[str, int]) -> int:
    """Bytes of the cache that a decode step reads. Layers with shared keys and values read those of an earlier one."""
    with_window, without = (
        [kind for kind in kinds if (kind.window is not None) == windows and not kind.recurrent]
        for windows in (True, False)
    )
    rings, pool = (len(alike) / max(1, sum(not kind.shared for kind in alike)) for alike in (with_window, without))
    return int(pool * (parts["pool"] + parts["tail"]) + rings * parts["rings"])


# --- bytes of weights -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Path and shape of every weight."""
    return shapes_by_path(config)


def parameters(config: ModelConfig) -> tuple[int, int]:
    """Numbers of parameters: stored ones, and active ones, which are those without the experts that a token skips."""
    stored = sum(map(math.prod, _weights(config).values()))
    return stored, stored - config.decoder.idle_parameters


def weight_bytes(config: ModelConfig, dtype: str, model: int, platform: str) -> int:
    """Bytes of the weights on one of `model` chips that share them."""
    mesh: Any = AbstractMesh((1, model), ("data", "model"))
    shards = (
        NamedSharding(mesh, sharding.spec(path, shape, mesh)).shard_shape(shape)
        for path, shape in _weights(config).items()
    )
    return sum(array_bytes(shard, jax.numpy.dtype(dtype), platform) for shard in shards)


def read_weights(params: Any) -> tuple[Any, Any]:
    """The weights that a decode step reads: all layers and the head, and experts, of which it reads some.

    Of the embedding, and of the table of vectors for every layer (Gemma 4), it reads only one row.
    """
    decoder = params.decoder
    table = decoder.layer_inputs
    mixed = None if table is None else (table.projection, table.norm)
    experts = [(e.gate, e.up, e.down) for layer in decoder.layers if (e := layer.experts) is not None]
    inside = {id(leaf) for leaf in jax.tree.leaves(experts)}
    head = decoder.embedding if decoder.head is None else decoder.head
    return [leaf for leaf in jax.tree.leaves((decoder.layers, mixed, head)) if id(leaf) not in inside], experts


def experts_read(c: DecoderConfig, rows: float) -> float:
    """The share of its experts that a decode step of `rows` rows reads, if every expert is equally likely."""
    return 1.0 if c.experts is None else 1 - (1 - c.experts.active / c.experts.count) ** rows


def step_bytes(params: Any, rows: int, entries: float) -> float:
    """Bytes that a decoding step must read: weights (one row of an untied embedding), and the entries of all layers.

    `entries` are those of a row in each layer; a layer with a window has as many as the window at most. States are
    small, and are not counted.
    """
    c = params.config.decoder
    itemsize = params.decoder.embedding.weight[...].dtype.itemsize
    weights = tree_bytes((*read_weights(params), params.decoder.norm))
    if params.decoder.head is not None:
        weights += c.width * itemsize
    kinds = [kind for kind in c.kinds if not kind.recurrent and not kind.shared]
    held = sum(min(entries, kind.window or entries) * math.prod(c.heads_of(kind)) for kind in kinds)
    return weights + 2 * rows * held * itemsize


# --- bytes of arrays ------------------------------------------------------------------------------------------------


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves, which are arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def chip_bytes(tree: Any, platform: str) -> int:
    """Bytes of a tree's arrays on one chip, from ShapeDtypeStructs with shardings."""
    leaves = [x for x in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)]  # no keys
    shards = [tuple(x.shape) if x.sharding is None else x.sharding.shard_shape(tuple(x.shape)) for x in leaves]
    return sum(array_bytes(shard, x.dtype, platform) for shard, x in zip(shards, leaves, strict=True))


def array_bytes(shape: tuple[int, ...], dtype: Any, platform: str) -> int:
    """Bytes of an array on a chip of this platform.

    A TPU stores the two innermost axes of an array in tiles of 8 x 128 numbers. Arrays with fewer lines have smaller
    tiles, but at least 2 lines for 16-bit numbers, because two of them share a word. The runtime chooses the innermost
    axes of each array so that padding is smallest; so does this function.
    """
    itemsize, count = np.dtype(dtype).itemsize, math.prod(shape)
    if platform != "tpu" or 0 in shape:
        return count * itemsize
    packed = max(1, _WORD // itemsize)
    if not shape:
        return _LANES * _WORD
    if len(shape) == 1:
        return _up(shape[0], _LANES * packed) * itemsize
    tiles = {lines: min(_LINES, max(packed, 1 << (lines - 1).bit_length())) for lines in shape}  # a power of two
    padded = (
        count // (lines * lanes) * _up(lines, tiles[lines]) * _up(lanes, _LANES)
        for lines, lanes in permutations(shape, 2)
    )
    return min(padded) * itemsize


def _up(n: int, tile: int) -> int:
    return -(-n // tile) * tile


# --- layers ---------------------------------------------------------------------------------------------------------


def full_attention(c: DecoderConfig) -> DecoderConfig:
    """The config of a decoder that has only the layers with full attention, as policies count them."""
    numbers, e = [i for i, kind in enumerate(c.kinds) if kind.is_counted], c.experts
    if e is not None:
        e = dataclasses.replace(e, layers=tuple(number for number, i in enumerate(numbers) if i in e.layers))
    return dataclasses.replace(c, layers=len(numbers), windows=(), shared_layers=0, recurrent=None, experts=e)


def _attends(c: DecoderConfig) -> Bool[np.ndarray, " L"]:
    """Which layers have attention."""
    return np.array([not kind.recurrent for kind in c.kinds])


def _per_token(c: DecoderConfig) -> Counts:
    """Operations of every layer for one token, without attention between tokens. Only active experts compute.

    The gated delta rule reads its memory twice and writes it once, as it does token by token.
    """
    e, r, (kv_heads, head_dim) = c.experts, c.recurrent, _heads(c)
    mlp = np.array([3 * c.mlp_width_of(i) for i in range(c.layers)])
    if e is not None:
        mlp[list(e.layers)] += e.count + 3 * e.active * e.width + (0 if e.shared is None else 3 * e.shared + 1)
    extra = 0 if c.layer_inputs is None else 3 * c.layer_inputs.width
    products = [0 if kind.shared else 1 if c.key_is_value and kind.window is None else 2 for kind in c.kinds]
    attention = c.width * ((2 + c.gated) * c.heads * head_dim + np.array(products) * kv_heads * head_dim)
    recurrence = 0
    if r is not None:
        keys, values = r.key_heads * r.key_dim, r.heads * r.value_dim
        recurrence = c.width * (2 * keys + 3 * values + 2 * r.heads) + 3 * values * r.key_dim
    return 2 * (np.where(_attends(c), attention, recurrence) + c.width * (mlp + extra))


def _heads(c: DecoderConfig) -> Int[np.ndarray, "2 L"]:
    """K and H of every layer."""
    return np.array([c.heads_of(kind) for kind in c.kinds]).T
