"""Attention of one query per row over lists of entries of different lengths, in plain XLA; for decoding on a CPU.

The entries of each row and head are cut into blocks. The blocks of all rows and heads form one queue, and a few are
processed at a time. So the work is the sum of the lengths, not the largest length times the number of heads. The
buffers fit the cache of one core; buffers as large as the pool would be new memory pages in every step.

Axes: B batch · N query heads · K key heads · G = N/K · S = B K segments · R bound on the entries of a segment ·
C entries of a block · W blocks processed at a time · H head dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import quantized
from pallas_kernels.decode_attention.reference import DecodeArguments
from pallas_kernels.denominator import normalized
from pallas_kernels.dispatch import target_platform
from pallas_kernels.quantized import Quantized

PlaceOf = Callable[[Array, Array], Array]


class _State(NamedTuple):
    """State of an online softmax; `total` is not yet divided by `weight`. W more segments than there are."""

    total: Float[Array, "s G H"]
    peak: Float[Array, "s G"]
    weight: Float[Array, "s G"]
    logits: Float[Array, "blocks G C"] | None  # in the order of the queue


class _Queue(NamedTuple):
    """The blocks of all segments in order."""

    block: int  # C
    together: int  # W
    longest: int  # bound on the blocks of a segment
    entries_of: Int[Array, " S"]  # number of entries of each segment
    blocks: Int[Array, " S"]  # of each segment
    ends: Int[Array, " S"]

    def entries(self, i: Any) -> tuple[Array, Array, Bool[Array, "W C"], Bool[Array, " W"]]:
        """Of the W blocks from number i on: segment, first entry, which entries exist, and which blocks are new."""
        number = i + jnp.arange(self.together)
        new = number < self.ends[-1]  # in the last iteration, some blocks are repeated
        number = jnp.minimum(number, self.ends[-1] - 1)
        segment = jnp.sum(number[:, None] >= self.ends, axis=1)
        first = (number - (self.ends - self.blocks)[segment]) * self.block
        inside = first[:, None] + jnp.arange(self.block) < self.entries_of[segment][:, None]
        return segment, first, inside, new


def attend(
    args: DecodeArguments, count: Int[Array, " S"], place_of: PlaceOf | None = None
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "S G R"] | None]:
    """softmax(q k^T / sqrt(H)) v over the entries of every segment, by an online softmax.

    Args:
        args: of the op.
        count: number of entries of each segment. All that are read must be finite numbers.
        place_of: maps a segment and numbers of entries to their offsets from the start of the segment, also for numbers
            from `count` on; None: the offsets are the numbers.

    Returns:
        The attention, the log of the denominator (-inf for an empty segment), both in float32, and with
        `args.return_mass` the probability of each entry, 0 for entries without a part.
    """
    (batch, heads, head_dim), segments = args.q.shape, count.shape[0]
    q = quantized.to_basis(args.q, args.k).reshape(segments, -1, head_dim)
    bound = min(args.max_length, args.k.shape[2])
    block, together = _sizes(bound, 2 * head_dim * args.k.dtype.itemsize, segments)
    blocks = jnp.maximum(-(-count // block), 1)  # an empty segment has one masked block, so that the queue has no gaps
    queue = _Queue(block, together, -(-bound // block), count, blocks, jnp.cumsum(blocks))
    read = jax.vmap(_reader(args, place_of, queue.block))

    def step(i: Any, state: _State) -> _State:
        segment, first, inside, new = queue.entries(i)
        keys, values, valid = read(segment, first)
        logits = jnp.einsum("wch,wgh->wcg", keys, q[segment], preferred_element_type=jnp.float32) * head_dim**-0.5
        # The product is faster with G last.
        logits = jnp.where((inside & valid)[..., None], logits, -jnp.inf).swapaxes(1, 2)
        logits = jnp.where(new[:, None, None], logits, -jnp.inf)
        if state.logits is not None:
            state = state._replace(logits=jax.lax.dynamic_update_slice_in_dim(state.logits, logits, i, 0))
        return _add(state, segment, logits, values)

    padded, groups = segments + queue.together, q.shape[1]
    logits = None
    if args.return_mass:
        logits = jnp.full((segments * queue.longest + queue.together, groups, queue.block), -jnp.inf)
    each = padded, groups
    state = _State(jnp.zeros((*each, head_dim)), jnp.full(each, -jnp.inf), jnp.zeros(each), logits)
    if queue.together == segments * queue.longest:  # a short tail: avoids compiling a loop
        state = step(jnp.int32(0), state)
    else:
        turns = -(-queue.ends[-1] // queue.together)
        state = jax.lax.fori_loop(0, turns, lambda i, state: step(i * queue.together, state), state)
    out, lse = normalized(*(x[:segments] for x in state[:3]))
    mass = None
    if state.logits is not None:  # from the order of the queue to the order of the segments
        logits = state.logits[(queue.ends - queue.blocks)[:, None] + jnp.arange(queue.longest)]
        logits = logits.swapaxes(1, 2).reshape(segments, groups, -1)
        logits = jnp.where(jnp.arange(bound) < count[:, None, None], logits[..., :bound], -jnp.inf)
        mass = jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
    return quantized.from_basis(out.reshape(batch, heads, head_dim), args.v), lse.reshape(batch, heads), mass


def _add(state: _State, segment: Int[Array, " W"], logits: Float[Array, "W G C"], values: Array) -> _State:
    """Adds W blocks to the online softmax. They are in order, so they belong to at most W consecutive segments."""
    begin, count = segment[0], len(segment)
    at = (segment - begin)[:, None] == jnp.arange(count)  # [block, segment]
    total, peak, weight = (jax.lax.dynamic_slice_in_dim(x, begin, count) for x in state[:3])
    of_block = jnp.max(logits, axis=-1)[:, None]
    new_peak = jnp.maximum(peak, jnp.max(jnp.where(at[..., None], of_block, -jnp.inf), axis=0))
    shift = jnp.where(jnp.isfinite(new_peak), new_peak, 0.0)
    p = jnp.exp(logits - shift[segment - begin][..., None])
    rescale, join = jnp.exp(peak - shift), at.astype(jnp.float32)
    part = jnp.einsum("wgc,wch->wgh", p.astype(values.dtype), values, preferred_element_type=jnp.float32)
    total = total * rescale[..., None] + jnp.einsum("wu,wgh->ugh", join, part, precision="highest")
    weight = weight * rescale + jnp.einsum("wu,wg->ug", join, jnp.sum(p, axis=-1), precision="highest")
    new = (total, new_peak, weight)
    update = [jax.lax.dynamic_update_slice_in_dim(x, y, begin, 0) for x, y in zip(state[:3], new, strict=True)]
    return state._replace(total=update[0], peak=update[1], weight=update[2])


def _reader(args: DecodeArguments, place_of: PlaceOf | None, block: int) -> Callable[[Array, Array], Any]:
    """Maps a segment and its first entry of a block to keys and values [C, H] and a mask [C] of valid entries."""
    kv_heads, columns, begin = args.start.shape[1], args.k.shape[1], args.start.reshape(-1)

    def read(segment: Array, first: Array) -> tuple[Array, Array, Array]:
        row, head, number = segment // kv_heads, segment % kv_heads, first + jnp.arange(block)
        place = number if place_of is None else place_of(segment, number)

        def fetch(pool: Array | Quantized) -> Array:
            # In an array, gathered rows are as fast as a slice; in a quantised pool a slice is faster.
            if isinstance(pool, Quantized) and place_of is None:
                return quantized.read_block(pool, row, head % columns, begin[segment] + first, block)
            return quantized.read_slots(pool, row, head % columns, begin[segment] + place)

        valid = jnp.ones(block, bool)
        if args.valid is not None:
            valid = args.valid.at[row, head, place].get(mode="fill", fill_value=False)
        return fetch(args.k), fetch(args.v), valid

    return read


def _sizes(bound: int, entry: int, segments: int) -> tuple[int, int]:
    """C and W. A CPU processes a few blocks at a time, to stay in a core's cache; an accelerator all at once."""
    block, total = max(1, min(128, bound)), 2**20 if target_platform() == "cpu" else 2**26  # bytes
    together = max(1, min(total // (block * entry), segments * -(-bound // block)))
    if together > segments:  # segments usually have equally many blocks: avoids a last iteration with a few left over
        together -= together % segments
    return block, together
