"""prefill_attention in plain XLA, block by block: differentiable, for any backend.

Axes: B batch · T queries · S keys · N query heads · K key heads · G = N/K · H head dim · C queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cpu import restored, stored
from pallas_kernels.dispatch import target_platform
from pallas_kernels.prefill_attention.reference import Attended, PrefillArguments

# Logits held at a time, in elements: this is what prefill attention adds to the peak memory. On a CPU key heads are
# processed one by one, which halves the time. An accelerator processes all of them at once in large blocks, since each
# launch costs time; it uses this file only if its own kernel does not apply.
_BLOCK_ELEMENTS = {"cpu": 2**23, "accelerator": 2**28}
_SMALL = 2**20  # logits in total: with fewer, a CPU computes all heads at once
_GROUPS = 8  # causal: at most 8 static groups of queries, each with its own prefix of keys, waste 1/16 of the work
_TILE = 16  # queries: the smallest block
_LARGEST = 512  # queries: the largest block on an accelerator

# One key head of one row: q [G, T, H], k and v [T, H], valid, place and until [T].
Row = tuple[Array, Array, Array, Array | None, Array | None, Array | None]
HeadAttended = tuple[Array, Array | None]  # the same: attention [G, T, H]; log-sum-exp [G, T] if asked for


def prefill_attention_xla(args: PrefillArguments) -> Attended:
    """Implements `prefill_attention`. A query without any allowed key gets an arbitrary average of values."""
    q, k, v, return_lse = args.q, args.k, args.v, args.return_lse
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    one_by_one, block = _plan(batch, length, heads, kv_heads, args.causal)

    def attend(row: Row) -> HeadAttended:
        options: dict[str, Any] = dict(window=args.window, ahead=args.ahead, return_lse=return_lse)
        if args.window is not None and args.window + min(block, args.window) + args.ahead < length:
            return _one_head_in_window(*row, block=min(block, args.window), **options)
        return _one_head(*row, causal=args.causal, block=block, **options)

    q = q.reshape(batch, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, K, T, H]
    by_head = jax.tree.map(
        lambda x: jnp.broadcast_to(x[:, None], (batch, kv_heads, length)), (args.valid, args.place, args.until)
    )
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, *by_head))
    out, lse = _over_queries(attend, rows, return_lse) if one_by_one else jax.vmap(attend)(rows)
    out = out.reshape(batch, kv_heads, -1, length, head_dim).transpose(0, 3, 1, 2, 4)
    out = out.reshape(batch, length, heads, head_dim).astype(v.dtype)
    return out, None if lse is None else lse.reshape(batch, heads, length)


def _over_queries(attend: Callable[[Row], HeadAttended], rows: Row, return_lse: bool) -> HeadAttended:
    """Runs `attend` on each row in turn and overwrites the row's queries with its result.

    `lax.map` would write to a buffer of its own, initialised with zeros, and XLA allocates these buffers for all layers
    of a model before the first layer begins.
    """

    def one(i: Int[Array, ""], made: HeadAttended) -> HeadAttended:
        row = restored(made[0][i], dtype), *jax.tree.map(lambda x: x[i], rows[1:])
        out, lse = attend(row)
        new = stored(out.astype(dtype)), lse
        return jax.tree.map(lambda whole, new: whole.at[i].set(new), made, new)

    dtype = rows[0].dtype
    lse = jnp.zeros(rows[0].shape[:3], jnp.float32) if return_lse else None
    out, lse = jax.lax.fori_loop(0, rows[0].shape[0], one, (stored(rows[0]), lse))
    return restored(out, dtype), lse


def _plan(batch: int, length: int, heads: int, kv_heads: int, causal: bool) -> tuple[bool, int]:
    """Whether to process key heads one by one, and the number of queries of a block."""
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
    place: Int[Array, " T"] | None,
    until: Int[Array, " T"] | None,
    *,
    causal: bool,
    window: int | None,
    ahead: int,
    block: int,
    return_lse: bool,
) -> HeadAttended:
    length = k.shape[0]
    blocks = -(-length // block)
    per_group = -(-blocks // _GROUPS) if causal else blocks
    q = jnp.pad(q, [(0, 0), (0, blocks * block - length), (0, 0)])
    index = jnp.arange(blocks * block)
    place, until = (index if x is None else jnp.pad(x, (0, blocks * block - length)) for x in (place, until))

    out = []
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        seen = min(last * block + ahead, length) if causal else length
        part = q[:, first * block : last * block].reshape(q.shape[0], last - first, block, -1)
        keys = _Keys(k[:seen], v[:seen], None if valid is None else valid[:seen], index[:seen], place[:seen])
        own = tuple(x[first * block : last * block].reshape(-1, block) for x in (until, place))
        if last - first == 1:
            out.append(_attend(keys, part[:, 0], own[0][0], own[1][0], causal, window, return_lse))
        else:
            parts = jax.lax.map(
                lambda block, keys=keys: _attend(keys, *block, causal, window, return_lse), (part.swapaxes(0, 1), *own)
            )
            out.append(jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(q.shape[0], -1, *x.shape[3:]), parts))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1)[:, :length], *out)


def _one_head_in_window(
    q: Float[Array, "G T H"],
    k: Float[Array, "T H"],
    v: Float[Array, "T H"],
    valid: Bool[Array, " T"] | None,
    place: Int[Array, " T"] | None,
    until: Int[Array, " T"] | None,
    *,
    window: int,
    ahead: int,
    block: int,
    return_lse: bool,
) -> HeadAttended:
    """Each block of queries reads only its own keys, the `window` - 1 before them and the `ahead` after them."""
    length = k.shape[0]
    blocks, before = -(-length // block), window - 1
    spare = blocks * block - length
    after = spare + ahead
    index = jnp.arange(-before, blocks * block + ahead)
    valid = (index >= 0) & (index < length) if valid is None else jnp.pad(valid, (before, after))
    place, until = (index if x is None else jnp.pad(x, (before, after)) for x in (place, until))
    k, v = (jnp.pad(x, [(before, after), (0, 0)]) for x in (k, v))
    q = jnp.pad(q, [(0, 0), (0, spare), (0, 0)]).reshape(q.shape[0], blocks, block, -1).swapaxes(0, 1)

    def one(args: tuple[Float[Array, "G C H"], Int[Array, ""]]) -> HeadAttended:
        q, number = args
        *seen, last = (
            jax.lax.dynamic_slice_in_dim(x, number * block, before + block + ahead)
            for x in (k, v, valid, index, place, until)
        )
        keys, own = _Keys(*seen), slice(before, before + block)
        return _attend(keys, q, last[own], keys.place[own], True, window, return_lse)

    parts = jax.lax.map(one, (q, jnp.arange(blocks)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(q.shape[1], -1, *x.shape[3:])[:, :length], parts)


class _Keys(NamedTuple):
    """The keys that a block of queries may attend to."""

    k: Float[Array, "S H"]
    v: Float[Array, "S H"]
    valid: Bool[Array, " S"] | None
    number: Int[Array, " S"]  # index in the row
    place: Int[Array, " S"]


# Recomputed in the backward pass, so that training does not store the probabilities of every block.
@partial(jax.checkpoint, static_argnums=(4, 5, 6))
def _attend(
    keys: _Keys,
    q: Float[Array, "G C H"],
    until: Int[Array, " C"],
    place: Int[Array, " C"],
    causal: bool,
    window: int | None,
    return_lse: bool,
) -> HeadAttended:
    """Attention of a block of queries to these keys; `until` and `place` as in `prefill_attention`, of the queries."""
    logits = jnp.einsum("gch,sh->gcs", q, keys.k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    allowed = jnp.ones((1, logits.shape[-1]), bool)
    if causal:
        allowed = allowed & (keys.number <= until[:, None])
    if window is not None:
        allowed = allowed & (place[:, None] - keys.place < window)
    if keys.valid is not None:
        allowed = allowed & keys.valid
    logits = jnp.where(allowed, logits, jnp.finfo(jnp.float32).min)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("gcs,sh->gch", weights.astype(keys.v.dtype), keys.v, preferred_element_type=jnp.float32)
    lse = (peak + jnp.log(total))[..., 0] if return_lse else None
    return (out / total).astype(keys.v.dtype), lse  # dividing [G, C, H] is cheaper than dividing [G, C, S]
