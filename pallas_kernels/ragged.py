"""Attention of one query per row over lists of entries of different lengths, in plain XLA; for decoding on a CPU.

The entries of each row and head are cut into blocks. The blocks of all rows and heads form one queue, and a few are
processed at a time. So the work is the sum of the lengths, not the largest length times the number of heads. The
buffers fit the cache of one core; buffers as large as the pool would be new memory pages in every step.

Axes: B batch · N query heads · K key heads · G = N/K · S = B K segments · R bound on the entries of a segment ·
C entries of a block · W blocks processed at a time · H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.denominator import normalized
from pallas_kernels.dispatch import target_platform

Read = Callable[[Array, Array], tuple[Array, Array, Array]]


def attend(
    q: Float[Array, "B N H"],
    count: Int[Array, " S"],
    read: Callable[[int], Read],
    *,
    bound: int,
    itemsize: int,
    return_logits: bool,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "S G R"] | None]:
    """softmax(q k^T / sqrt(H)) v over the entries of every segment, by an online softmax.

    Args:
        q: one query per row.
        count: number of entries of each segment.
        read: maps C to a function from a segment and the first entry of a block to keys and values [C, H] and a mask
            [C] of those that take part. Entries from `count` on are masked here, but must be finite numbers.
        bound: R.
        itemsize: bytes per number of the pool.
        return_logits: whether to return the logits too; -inf for entries that take no part.

    Returns:
        The attention, the log of the denominator (-inf for an empty segment), both in float32, and the logits.
    """
    batch, heads, head_dim = q.shape
    segments = count.shape[0]
    q = q.reshape(segments, -1, head_dim)
    groups = q.shape[1]
    block, together = _sizes(bound, 2 * head_dim * itemsize, segments)
    most = -(-bound // block)  # blocks of a segment
    take = jax.vmap(read(block))
    blocks = jnp.maximum(-(-count // block), 1)  # an empty segment has one masked block, so that the queue has no gaps
    ends = jnp.cumsum(blocks)

    def step(i: Array, state: tuple) -> tuple:
        total, peak, weight, logits = state
        number = jnp.minimum(i + jnp.arange(together), ends[-1] - 1)
        segment = jnp.sum(number[:, None] >= ends, axis=1)
        first = (number - (ends - blocks)[segment]) * block
        keys, values, inside = take(segment, first)
        inside = inside & (first[:, None] + jnp.arange(block) < count[segment][:, None])
        new = i + jnp.arange(together) < ends[-1]  # in the last step, some blocks are repeated
        x = jnp.einsum("wch,wgh->wcg", keys, q[segment], preferred_element_type=jnp.float32) * head_dim**-0.5
        x = jnp.where(inside[..., None], x, -jnp.inf).swapaxes(1, 2)  # the product is faster with G last
        x = jnp.where(new[:, None, None], x, -jnp.inf)
        if return_logits:
            logits = jax.lax.dynamic_update_slice_in_dim(logits, x, i, 0)

        # Blocks are in order, so the current ones belong to at most W consecutive segments.
        begin = segment[0]
        at = (segment - begin)[:, None] == jnp.arange(together)  # [block, segment]
        old_total, old_peak, old_weight = (_window(y, begin, together) for y in (total, peak, weight))
        both = jnp.maximum(old_peak, jnp.max(jnp.where(at[..., None], jnp.max(x, axis=-1)[:, None], -jnp.inf), axis=0))
        shift = jnp.where(jnp.isfinite(both), both, 0.0)
        p = jnp.exp(x - shift[segment - begin][..., None])
        rest = jnp.exp(old_peak - shift)
        part = jnp.einsum("wgc,wch->wgh", p.astype(values.dtype), values, preferred_element_type=jnp.float32)
        join = at.astype(jnp.float32)
        new_total = old_total * rest[..., None] + jnp.einsum("wu,wgh->ugh", join, part, precision="highest")
        new_weight = old_weight * rest + jnp.einsum("wu,wg->ug", join, jnp.sum(p, axis=-1), precision="highest")
        return (
            jax.lax.dynamic_update_slice_in_dim(total, new_total, begin, 0),
            jax.lax.dynamic_update_slice_in_dim(peak, both, begin, 0),
            jax.lax.dynamic_update_slice_in_dim(weight, new_weight, begin, 0),
            logits,
        )

    padded = segments + together
    state = (
        jnp.zeros((padded, groups, head_dim)),
        jnp.full((padded, groups), -jnp.inf),
        jnp.zeros((padded, groups)),
        jnp.full((segments * most + together, groups, block), -jnp.inf) if return_logits else None,
    )
    if together == segments * most:  # a short tail: avoids compiling a loop
        total, peak, weight, logits = step(jnp.int32(0), state)
    else:
        turns = -(-ends[-1] // together)
        total, peak, weight, logits = jax.lax.fori_loop(0, turns, lambda i, s: step(i * together, s), state)
    out, lse = normalized(total[:segments], peak[:segments], weight[:segments])
    if logits is not None:  # from the order of the queue to the order of the segments
        logits = logits[(ends - blocks)[:, None] + jnp.arange(most)].swapaxes(1, 2).reshape(segments, groups, -1)
        logits = jnp.where(jnp.arange(bound) < count[:, None, None], logits[..., :bound], -jnp.inf)
    return out.reshape(batch, heads, head_dim), lse.reshape(batch, heads), logits


def probabilities(logits: Float[Array, "S G R"], lse: Float[Array, "B N"]) -> Float[Array, "S G R"]:
    """The probability of each entry in `attend`, from its logits and log-denominators; 0 for entries without a part."""
    lse = lse.reshape(logits.shape[:2])
    return jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])


def _window(x: Array, begin: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, begin, size)


def _sizes(bound: int, entry: int, segments: int) -> tuple[int, int]:
    """C and W. A CPU processes a few blocks at a time, to stay in a core's cache; an accelerator all at once."""
    block, total = max(1, min(128, bound)), 2**20 if target_platform() == "cpu" else 2**26  # bytes
    together = max(1, min(total // (block * entry), segments * -(-bound // block)))
    if together > segments:  # segments usually have equally many blocks: avoids a last iteration with a few left over
        together -= together % segments
    return block, together
