"""prefill_attention for TPU: jax's splash attention, which skips blocks that causality masks.

Valid tokens and padding are two segments, so neither attends to the other and every query has a key. Head dims are
padded to the 128 lanes that a TPU reads at once.
Axes: B batch · T tokens · N query heads · K key heads · G = N/K · H head dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array

from pallas_kernels.prefill_attention.reference import Attended, PrefillArguments
from pallas_kernels.tpu import LANES

_BLOCK = 512  # queries and keys of a block


# Under jit, so that it is traced once for all layers of a model, which have the same shapes.
@functools.partial(jax.jit, static_argnames="interpret")
def prefill_attention_mosaic_tpu(args: PrefillArguments, interpret: bool = False) -> Attended:
    """Implements `prefill_attention` for TPU, without log-sum-exp."""
    q, k, v, valid = args.q, args.k, args.v, args.valid
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    block = min(_BLOCK, _filled(length, LANES))
    padded = _filled(length, block)
    padding = [(0, 0), (0, padded - length), (0, 0), (0, _filled(head_dim, LANES) - head_dim)]
    scaled = q * q.dtype.type(head_dim**-0.5)
    q, k, v = (jnp.pad(x, padding).swapaxes(1, 2) for x in (scaled, k, v))  # [B, heads, T, H]
    exists = jnp.ones((batch, length), bool) if valid is None else valid
    segment = jnp.pad(exists, padding[:2]).astype(jnp.int32)
    mask: masks.Mask = masks.CausalMask((padded, padded)) if args.causal else masks.FullMask((padded, padded))
    if args.window is not None:
        mask = masks.LocalMask((padded, padded), window_size=(args.window - 1, 0), offset=0)
    group = heads // kv_heads
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: Any = {f"block_{name}": block for name in names}
    sizes = splash.BlockSizes(**blocks)
    heads_mask = masks.MultiHeadMask([mask] * group)
    run = splash.make_splash_mqa_single_device(mask=heads_mask, block_sizes=sizes, interpret=interpret)

    def row(q: Array, k: Array, v: Array, segment: Array) -> Array:
        ids = splash.SegmentIds(q=segment, kv=segment)
        return jax.vmap(lambda q, k, v: run(q, k, v, segment_ids=ids))(q, k, v)

    out = jax.vmap(row)(q.reshape(batch, kv_heads, group, padded, -1), k, v, segment)
    return Attended(out.reshape(batch, heads, padded, -1).swapaxes(1, 2)[:, :length, :, :head_dim])


def unsupported(args: PrefillArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    q, k, v = args.q, args.k, args.v
    if args.until is not None:
        return "it cannot attend in both directions within an image"
    if args.place is not None:
        return "its window counts indices, and the tokens have other places"
    if args.return_lse:
        return "it returns no log-sum-exp"
    if {q.dtype, k.dtype, v.dtype} not in ({jnp.dtype(jnp.float32)}, {jnp.dtype(jnp.bfloat16)}):
        return f"queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}, not all bfloat16 or all float32"
    if q.shape[1] < LANES:
        return f"{q.shape[1]} tokens do not fill a block of {LANES}"
    return None


def _filled(n: int, tile: int) -> int:
    return -(-n // tile) * tile
