"""prefill_attention in plain XLA, block by block: differentiable, for any backend.

Axes: B batch · T queries · S keys · N query heads · K key heads · G = N/K · H head dim · C queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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


class _Row(NamedTuple):
    """One key head of one row."""

    q: Float[Array, "G T H"]
    k: Float[Array, "T H"]
    v: Float[Array, "T H"]
    valid: Bool[Array, " T"] | None
    place: Int[Array, " T"] | None
    until: Int[Array, " T"] | None
    row_weight: Float[Array, "R T"] | None


class _Options(NamedTuple):
    """Options of `prefill_attention` that each block of queries needs."""

    causal: bool
    window: int | None
    return_lse: bool
    statistics: tuple[tuple[str, float], ...]


class _Part(NamedTuple):
    """The result for one key head, or for a block of its queries; then T counts those of the block."""

    out: Float[Array, "G T H"]
    lse: Float[Array, "G T"] | None
    mass: Float[Array, "R G S"] | None


def prefill_attention_xla(args: PrefillArguments) -> Attended:
    """Implements `prefill_attention`. A query without any allowed key gets an arbitrary average of values."""
    q, k, v = args.q, args.k, args.v
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    one_by_one, block = _plan(batch, length, heads, kv_heads, args.causal)
    options = _Options(args.causal, args.window, args.return_lse, args.statistics)

    def attend(row: _Row) -> _Part:
        window = args.window if args.row_weight is None else None
        if window is not None and window + min(block, window) + args.ahead < length:
            return _one_head_in_window(row, options, ahead=args.ahead, block=min(block, window))
        return _one_head(row, options, ahead=args.ahead, block=block)

    q = q.reshape(batch, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, K, T, H]
    by_head = jax.tree.map(
        lambda x: jnp.broadcast_to(x[:, None], (batch, kv_heads, *x.shape[1:])),
        (args.valid, args.place, args.until, args.row_weight),
    )
    rows = _Row(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, *by_head)))
    out, lse, mass = _over_queries(attend, rows, options) if one_by_one else jax.vmap(attend)(rows)
    out = out.reshape(batch, kv_heads, -1, length, head_dim).transpose(0, 3, 1, 2, 4)
    out = out.reshape(batch, length, heads, head_dim).astype(v.dtype)
    if mass is not None:
        mass = mass.reshape(batch, kv_heads, -1, heads // kv_heads, length).swapaxes(1, 2)
        mass = mass.reshape(batch, -1, heads, length)
    return Attended(out, None if lse is None else lse.reshape(batch, heads, length), mass)


def _over_queries(attend: Callable[[_Row], _Part], rows: _Row, options: _Options) -> _Part:
    """Runs `attend` on each row in turn and overwrites the row's queries with its result.

    `lax.map` would write to a buffer of its own, initialised with zeros, and XLA allocates these buffers for all layers
    of a model before the first layer begins.
    """

    def process(i: Int[Array, ""], results: _Part) -> _Part:
        row = _Row(restored(results.out[i], dtype), *jax.tree.map(lambda x: x[i], tuple(rows)[1:]))
        part = attend(row)
        part = part._replace(out=stored(part.out.astype(dtype)))
        return jax.tree.map(lambda old, new: old.at[i].set(new), results, part)

    (count, group, length, _), dtype, several = rows.q.shape, rows.q.dtype, len(options.statistics)
    lse = jnp.zeros((count, group, length), jnp.float32) if options.return_lse else None
    mass = jnp.zeros((count, several, group, length), jnp.float32) if several else None
    results = jax.lax.fori_loop(0, count, process, _Part(stored(rows.q), lse, mass))
    return results._replace(out=restored(results.out, dtype))


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


def _one_head(row: _Row, options: _Options, *, ahead: int, block: int) -> _Part:
    """Groups of blocks of queries, each with its own prefix of the keys if attention is causal."""
    q, k, v, valid = row.q, row.k, row.v, row.valid
    length, causal = k.shape[0], options.causal
    blocks = -(-length // block)
    per_group = -(-blocks // _GROUPS) if causal else blocks
    spare = blocks * block - length
    q = jnp.pad(q, [(0, 0), (0, spare), (0, 0)])
    index = jnp.arange(blocks * block)
    place, until = (index if x is None else jnp.pad(x, (0, spare)) for x in (row.place, row.until))
    weight = None if row.row_weight is None else jnp.pad(row.row_weight, [(0, 0), (0, spare)])

    out, masses = [], []
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        seen = min(last * block + ahead, length) if causal else length
        keys = _Keys(k[:seen], v[:seen], None if valid is None else valid[:seen], index[:seen], place[:seen])
        rows = slice(first * block, last * block)
        queries = _Queries(q[:, rows], until[rows], place[rows], None if weight is None else weight[:, rows])
        part = _in_blocks(keys, queries, options, count=last - first)
        out.append((part.out, part.lse))
        masses.append(None if part.mass is None else jnp.pad(part.mass, [(0, 0), (0, 0), (0, length - seen)]))
    attended, lse = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1)[:, :length], *out)
    return _Part(attended, lse, jax.tree.map(lambda *parts: sum(parts), *masses))


def _in_blocks(keys: _Keys, queries: _Queries, options: _Options, *, count: int) -> _Part:
    """Attention of `count` blocks of queries, one after the other, to the same keys."""
    if count == 1:  # avoids compiling a loop
        return _attend(keys, queries, options)

    def split(x: Array, axis: int) -> Array:
        """The blocks on a new first axis."""
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :]), axis, 0)

    q, until, place, weight = queries
    weight = None if weight is None else split(weight, 1)
    blocks = _Queries(split(q, 1), split(until, 0), split(place, 0), weight)
    parts = jax.lax.map(lambda block: _attend(keys, block, options), blocks)
    out, lse = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]), parts[:2])
    return _Part(out, lse, None if parts.mass is None else jnp.sum(parts.mass, axis=0))


def _one_head_in_window(row: _Row, options: _Options, *, ahead: int, block: int) -> _Part:
    """Each block of queries reads only its own keys, the `window` - 1 before them and the `ahead` after them."""
    assert options.window is not None
    q, (length, _) = row.q, row.k.shape
    blocks, before = -(-length // block), options.window - 1
    spare = blocks * block - length
    after = spare + ahead
    index = jnp.arange(-before, blocks * block + ahead)
    valid = (index >= 0) & (index < length) if row.valid is None else jnp.pad(row.valid, (before, after))
    place, until = (index if x is None else jnp.pad(x, (before, after)) for x in (row.place, row.until))
    k, v = (jnp.pad(x, [(before, after), (0, 0)]) for x in (row.k, row.v))
    q = jnp.pad(q, [(0, 0), (0, spare), (0, 0)]).reshape(q.shape[0], blocks, block, -1).swapaxes(0, 1)

    def attend_block(args: tuple[Float[Array, "G C H"], Int[Array, ""]]) -> _Part:
        q, number = args
        *seen, last = (
            jax.lax.dynamic_slice_in_dim(x, number * block, before + block + ahead)
            for x in (k, v, valid, index, place, until)
        )
        keys, rows = _Keys(*seen), slice(before, before + block)
        return _attend(keys, _Queries(q, last[rows], keys.place[rows], None), options)

    parts = jax.lax.map(attend_block, (q, jnp.arange(blocks)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(q.shape[1], -1, *x.shape[3:])[:, :length], parts)


class _Keys(NamedTuple):
    """The keys that a block of queries may attend to."""

    k: Float[Array, "S H"]
    v: Float[Array, "S H"]
    valid: Bool[Array, " S"] | None
    number: Int[Array, " S"]  # index in the row
    place: Int[Array, " S"]


class _Queries(NamedTuple):
    """A block of queries."""

    q: Float[Array, "G C H"]
    until: Int[Array, " C"]
    place: Int[Array, " C"]
    row_weight: Float[Array, "R C"] | None


# Recomputed in the backward pass, so that training does not store the probabilities of every block.
@partial(jax.checkpoint, static_argnums=(2,))
def _attend(keys: _Keys, queries: _Queries, options: _Options) -> _Part:
    """Attention of a block of queries to these keys."""
    q = queries.q
    logits = jnp.einsum("gch,sh->gcs", q, keys.k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    allowed = jnp.ones((1, logits.shape[-1]), bool)
    if options.causal:
        allowed = allowed & (keys.number <= queries.until[:, None])
    if options.window is not None:
        allowed = allowed & (queries.place[:, None] - keys.place < options.window)
    if keys.valid is not None:
        allowed = allowed & keys.valid
    logits = jnp.where(allowed, logits, jnp.finfo(jnp.float32).min)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("gcs,sh->gch", weights.astype(keys.v.dtype), keys.v, preferred_element_type=jnp.float32)
    lse = (peak + jnp.log(total))[..., 0] if options.return_lse else None
    out = (out / total).astype(keys.v.dtype)  # dividing [G, C, H] is cheaper than dividing [G, C, S]
    if queries.row_weight is None:
        return _Part(out, lse, None)
    each = [
        _received(weights, total[..., 0], of_row, statistic)
        for of_row, statistic in zip(queries.row_weight, options.statistics, strict=True)
    ]
    return _Part(out, lse, jnp.stack(each))


def _received(
    weights: Float[Array, "G C S"], total: Float[Array, "G C"], of_row: Float[Array, " C"], f: tuple[str, float]
) -> Float[Array, "G S"]:
    """What each key receives from these queries. `weights` are probabilities times `total`, and 1 at their maximum."""
    statistic, threshold = f
    if statistic == "sum":  # XLA on a CPU compiles every product with a vector by itself, but equal sums only once
        return jnp.sum((of_row / total)[..., None] * weights, axis=1)
    # As products of two arrays of this shape, which a CPU sums faster than one array.
    if statistic == "square":
        return jnp.einsum("gcs,gcs->gs", (of_row / total**2)[..., None] * weights, weights)
    if statistic == "entropy":
        p = weights / total[..., None]
        return jnp.einsum("gcs,gcs->gs", -of_row[:, None] * p, jnp.log(jnp.where(p > 0, p, 1.0)))
    counted = (weights >= threshold).astype(jnp.float32)
    return jnp.einsum("gcs,gcs->gs", jnp.broadcast_to(of_row[:, None], weights.shape), counted)
