"""prefill_attention in plain XLA, block by block: differentiable, any backend.

Axes: B batch · T queries · S keys · N query heads · K key heads · G = N/K · H head dim · C queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import target_platform

# Logits held at a time, in elements: what prefill attention adds to the peak memory. On a CPU key heads are taken one
# by one, which halves the time; an accelerator wants them all at once.
_BLOCK_ELEMENTS = {"cpu": 2**23, "accelerator": 2**24}
_SMALL = 2**20  # logits in all: not worth cutting on a CPU
_GROUPS = 8  # causal: queries in at most 8 static groups, each over its own prefix of keys, waste 1/16 of the work
_TILE = 16  # queries: the smallest block
_LARGEST = 512  # queries: the largest one on an accelerator

Row = tuple[Array, Array, Array, Array | None]  # of one key head: q [G, T, H], k and v [T, H], valid [T]


def prefill_attention_xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    valid: Bool[Array, "B T"] | None,
    causal: bool,
) -> Float[Array, "B T N H"]:
    """As `prefill_attention` says; a query without a key gets an average of nothing in particular."""
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    one_by_one, block = _plan(batch, length, heads, kv_heads, causal)

    def attend(row: Row) -> Array:
        return _one_head(*row, causal=causal, block=block)

    q = q.reshape(batch, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, K, T, H]
    if valid is not None:
        valid = jnp.broadcast_to(valid[:, None], (batch, kv_heads, length))
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, valid))
    out = _over_queries(attend, rows) if one_by_one else jax.vmap(attend)(rows)
    out = out.reshape(batch, kv_heads, -1, length, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim).astype(v.dtype)


def _over_queries(attend: Callable[[Row], Array], rows: Row) -> Float[Array, "R G T H"]:
    """Row by row, each result in the place of its queries.

    A loop with a buffer of its own, as `lax.map` has, would be handed one of zeros, and XLA makes those of all layers
    of a model before the first layer begins.
    """

    def one(i: Int[Array, ""], out: Float[Array, "R G T H"]) -> Float[Array, "R G T H"]:
        q, k, v, valid = jax.tree.map(lambda x: x[i], (out, *rows[1:]))
        return out.at[i].set(attend((q, k, v, valid)).astype(out.dtype))

    return jax.lax.fori_loop(0, rows[0].shape[0], one, rows[0])


def _plan(batch: int, length: int, heads: int, kv_heads: int, causal: bool) -> tuple[bool, int]:
    """Whether key heads are taken one by one, and how many queries at a time."""
    on_cpu = target_platform() == "cpu"
    one_by_one = on_cpu and batch * heads * length**2 > _SMALL
    together = heads // kv_heads if one_by_one else batch * heads
    fit = _BLOCK_ELEMENTS["cpu" if on_cpu else "accelerator"] // max(together * length, 1)
    if not on_cpu:
        wanted = _LARGEST
    elif one_by_one and causal:
        wanted = -(-length // (_GROUPS * _TILE)) * _TILE  # a block for each group
    else:
        wanted = length
    return one_by_one, max(1, min(length, wanted, max(_TILE, 2 ** max(fit, 1).bit_length() // 2)))


def _one_head(
    q: Float[Array, "G T H"],
    k: Float[Array, "T H"],
    v: Float[Array, "T H"],
    valid: Bool[Array, " T"] | None,
    *,
    causal: bool,
    block: int,
) -> Float[Array, "G T H"]:
    length = k.shape[0]
    blocks = -(-length // block)
    per_group = -(-blocks // _GROUPS) if causal else blocks
    q = jnp.pad(q, [(0, 0), (0, blocks * block - length), (0, 0)])

    out = []
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        seen = min(last * block, length) if causal else length
        part = q[:, first * block : last * block].reshape(q.shape[0], last - first, block, -1)
        places = jnp.arange(first * block, last * block).reshape(-1, block)
        attend = _attend(k[:seen], v[:seen], None if valid is None else valid[:seen], causal)
        if last - first == 1:
            out.append(attend((part[:, 0], places[0])))
        else:
            parts = jax.lax.map(attend, (part.swapaxes(0, 1), places))
            out.append(parts.swapaxes(0, 1).reshape(q.shape[0], -1, q.shape[2]))
    return jnp.concatenate(out, axis=1)[:, :length]


def _attend(
    k: Float[Array, "S H"], v: Float[Array, "S H"], valid: Bool[Array, " S"] | None, causal: bool
) -> Callable[[tuple[Array, Array]], Array]:
    """From a block of queries and their places to what they see of these keys."""

    # Recomputed in the backward pass: training must not keep the probabilities of every block either.
    @jax.checkpoint
    def block(args: tuple[Float[Array, "G C H"], Int[Array, " C"]]) -> Float[Array, "G C H"]:
        q, places = args
        logits = jnp.einsum("gch,sh->gcs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        allowed = jnp.ones((1, logits.shape[-1]), bool)
        if causal:
            allowed = allowed & (jnp.arange(logits.shape[-1]) <= places[:, None])
        if valid is not None:
            allowed = allowed & valid
        logits = jnp.where(allowed, logits, jnp.finfo(jnp.float32).min)
        weights = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.einsum("gcs,sh->gch", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return (out / total).astype(v.dtype)  # [G, C, H] divided instead of [G, C, S]

    return block
