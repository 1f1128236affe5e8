"""Both masses in plain XLA: a block of query rows at a time against all keys that they may attend to.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · G = N/K · H head dim · C rows of a block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_mass.reference import MassArguments, MassRowsArguments
from pallas_kernels.dispatch import target_platform

_BLOCK_ELEMENTS = 2**22  # logits held at a time, for one row of the batch
# Logits of one row of the batch: with more, a CPU processes rows and key heads one by one, which halves the time.
_SMALL = 2**20
_GROUPS = 8  # if rows are in order, each group of rows reads only its own prefix of the keys
_TILE = 16  # rows: the smallest block


def attention_mass_xla(args: MassArguments) -> Float[Array, "R N S"]:
    """Implements `attention_mass`. With `lse` it needs one pass over the logits, without it five."""
    heads, rows, _ = args.q.shape
    large = heads * rows * args.k.shape[1] > _SMALL
    return _one_by_one(args) if large and target_platform() == "cpu" else _mass(args, one_by_one=False)


@jax.custom_batching.sequential_vmap  # rows of the batch, too
def _one_by_one(args: MassArguments) -> Float[Array, "R N S"]:
    return _mass(args, one_by_one=True)


def _mass(args: MassArguments, *, one_by_one: bool) -> Float[Array, "R N S"]:
    heads, rows, head_dim = args.q.shape
    kv_heads, keys, _ = args.k.shape
    together = heads // kv_heads if one_by_one else heads
    block = min(rows, 512, _BLOCK_ELEMENTS // max(together * keys, 1))
    if args.causal and args.in_order:
        block = min(block, -(-rows // (_GROUPS * _TILE)) * _TILE)
    each = partial(_one_head, args, block=max(block, 1))
    q = args.q.reshape(kv_heads, -1, rows, head_dim)
    lse = None if args.lse is None else args.lse.reshape(kv_heads, -1, rows)
    mass = jax.lax.map(lambda x: each(*x), (q, args.k, lse)) if one_by_one else jax.vmap(each)(q, args.k, lse)
    # With `lse`, masked keys are not excluded before, because each key has a sum of its own.
    return jnp.where(args.key_mask, mass.swapaxes(0, 1).reshape(-1, heads, keys), 0.0)


def _one_head(
    args: MassArguments,
    q: Float[Array, "G T H"],
    k: Float[Array, "S H"],
    lse: Float[Array, "G T"] | None,
    *,
    block: int,
) -> Float[Array, "R G S"]:
    """The mass of the keys of one key head."""
    (rows, keys), ordered = (q.shape[1], k.shape[0]), args.causal and args.in_order
    blocks = -(-rows // block)
    per_group = -(-blocks // _GROUPS) if ordered else blocks
    pad = blocks * block - rows
    by_block = (
        jnp.pad(q, [(0, 0), (0, pad), (0, 0)]).reshape(len(q), blocks, block, -1).swapaxes(0, 1),
        jnp.pad(args.row_weight.astype(jnp.float32), [(0, 0), (0, pad)]).reshape(-1, blocks, block).swapaxes(0, 1),
        jnp.pad(args.row_place, [(0, pad)]).reshape(blocks, block),
        None if lse is None else jnp.pad(lse, [(0, 0), (0, pad)]).reshape(len(q), blocks, block).swapaxes(0, 1),
    )
    mass = jnp.zeros((len(args.row_weight), len(q), keys), jnp.float32)
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        end = min(last * block, keys) if ordered else keys
        # If `lse` is known, keys can be processed in parts, of which the first needs no causal mask.
        middle = first * block if ordered and lse is not None and args.statistic != "count" else 0
        group = jax.tree.map(lambda x, first=first, last=last: x[first:last], by_block)
        for start, stop in ((0, middle), (middle, end)):
            if start < stop:
                causal = args.causal and stop > middle
                of_block = partial(_of_block, args, k[start:stop], args.key_mask[start:stop], start if causal else None)
                part = _sum_over_blocks(of_block, group, last - first)
                mass = mass.at[..., start:stop].add(part)
    return mass


def _sum_over_blocks(of_block: Callable[..., Array], blocks: tuple[Any, ...], count: int) -> Float[Array, "R G s"]:
    """The sum of `of_block` over `count` blocks, which are on the first axis of each array."""
    if count == 1:  # avoids compiling a loop
        return of_block(*jax.tree.map(lambda x: x[0], blocks))
    total = jax.eval_shape(of_block, *jax.tree.map(lambda x: x[0], blocks))
    return jax.lax.scan(lambda total, x: (total + of_block(*x), None), jnp.zeros(total.shape), blocks)[0]


def _of_block(
    args: MassArguments,
    k: Float[Array, "s H"],
    key_mask: Bool[Array, " s"],
    start: int | None,
    q: Float[Array, "G C H"],
    weight: Float[Array, "R C"],
    place: Int[Array, " C"],
    lse: Float[Array, "G C"] | None,
) -> Float[Array, "R G s"]:
    """The mass that a block of rows gives to keys, of which the first has index `start`; None: no causal mask."""
    logits = jnp.einsum("gch,sh->gcs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    before = jnp.ones((1, len(k)), bool) if start is None else start + jnp.arange(len(k)) <= place[:, None]
    if lse is None or args.statistic == "count":
        p = softmax_statistic(logits, before & key_mask, args.softmax_n, args.statistic, args.threshold)
    else:
        denominator = jnp.logaddexp(lse, jnp.log(args.softmax_n)) if args.softmax_n else lse
        log_p = logits - denominator[..., None]
        p = jnp.exp(log_p * (2.0 if args.statistic == "square" else 1.0))
        p = jnp.where(p > 0, -p * log_p, 0.0) if args.statistic == "entropy" else p
        p = p if start is None else jnp.where(before, p, 0.0)
    if len(weight) == 1:  # as a product of two arrays of this shape, which a CPU sums faster than one array
        return jnp.einsum("gcs,gcs->gs", p, jnp.broadcast_to(weight[0][:, None], p.shape))[None]
    return jnp.einsum("rc,gcs->rgs", weight, p)


def attention_mass_rows_xla(args: MassRowsArguments) -> Float[Array, "R N T"]:
    """Implements `attention_mass_rows`."""
    q, k, causal, in_order = args.q, args.k, args.causal, args.in_order
    heads, rows, head_dim = q.shape
    keys = k.shape[1]
    block = max(1, min(rows, 512, _BLOCK_ELEMENTS // max(heads * keys, 1)))
    blocks = -(-rows // block)
    per_group = -(-blocks // _GROUPS) if causal and in_order else blocks
    pad = blocks * block - rows
    q = jnp.pad(q, [(0, 0), (0, pad), (0, 0)]).reshape(k.shape[0], -1, blocks, block, head_dim)
    q = q.transpose(2, 0, 1, 3, 4)
    places = jnp.pad(args.row_place, [(0, pad)]).reshape(blocks, block)
    weight = args.key_weight.astype(jnp.float32)

    parts = []
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        seen = min(last * block, keys) if causal and in_order else keys

        def give(block_of, seen=seen):
            q_block, place = block_of  # [K, G, block, H], [block]
            logits = jnp.einsum("kgth,ksh->kgts", q_block, k[:, :seen], preferred_element_type=jnp.float32)
            allowed = jnp.broadcast_to(args.key_mask[:seen], (block, seen))
            if causal:
                allowed = allowed & (jnp.arange(seen) <= place[:, None])
            p = softmax_statistic(logits * head_dim**-0.5, allowed, args.softmax_n, "sum", 0.0)
            return jnp.einsum("rs,kgts->rkgt", weight[:, :seen], p)

        slices = q[first:last], places[first:last]
        if last - first == 1:  # avoids compiling a loop
            parts.append(give(jax.tree.map(lambda x: x[0], slices))[None])
        else:
            parts.append(jax.lax.map(give, slices))
    mass = jnp.concatenate(parts).transpose(1, 2, 3, 0, 4)  # [R, K, G, blocks, block]
    return mass.reshape(-1, heads, blocks * block)[..., :rows]


def softmax_statistic(
    logits: Float[Array, "*n S"], allowed: Bool[Array, "*#n S"], softmax_n: float, statistic: str, threshold: float
) -> Float[Array, "*n S"]:
    """Probabilities over the allowed keys (zeros if there are none), squares, entropies, or which ones count."""
    peak = jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1, keepdims=True)
    if statistic == "count":  # p >= threshold * max p, without computing p
        return (allowed & (logits >= peak + jnp.log(threshold))).astype(jnp.float32)
    # softmax_n acts like additional logits of value 0, so the shift must be at least 0 to avoid overflow.
    shift = jnp.maximum(peak, 0.0) if softmax_n else jnp.where(jnp.isfinite(peak), peak, 0.0)
    exponent = jnp.where(allowed, jnp.exp(logits - shift), 0.0)
    total = jnp.sum(exponent, axis=-1, keepdims=True) + (softmax_n * jnp.exp(-shift) if softmax_n else 0.0)
    p = exponent / jnp.where(total > 0, total, 1.0)
    if statistic == "entropy":
        return -p * jnp.log(jnp.where(p > 0, p, 1.0))
    return p**2 if statistic == "square" else p
