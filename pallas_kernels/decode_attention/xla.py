"""decode_attention in plain XLA. The work is proportional to the used slots, on a CPU to those of the longest row.

On a CPU, a block is a number of slots of each segment, and an iteration of the loop reads a block of all rows and
heads. This is faster than reading head by head (`ragged`), because an iteration has more work, which XLA gives to more
cores. The longest segment determines the number of iterations. The heads of a row have segments of the same length in a
cache: a method that gives each head its own budget has a pool with one column, which is read head by head.

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · C slots of a block · H head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import ragged
from pallas_kernels.cpu import beside
from pallas_kernels.decode_attention.reference import Attended, DecodeArguments, Listed
from pallas_kernels.denominator import normalized
from pallas_kernels.dispatch import target_platform
from pallas_kernels.quantized import Quantized

_BYTES = 9 * 2**15  # keys of a block: just enough for XLA to copy it with more than one core
_LEAST, _MOST = 16, 128  # slots of a block
_FEW = 6  # query heads of a group for which, in the loop, a product each is faster than one product, on an EPYC


class _State(NamedTuple):
    """State of an online softmax, of all rows or of one; `total` is not yet divided by `weight`."""

    total: Float[Array, "*B K G H"]
    peak: Float[Array, "*B K G"]
    weight: Float[Array, "*B K G"]


def decode_attention_xla(args: DecodeArguments) -> Attended:
    """Implements `decode_attention`. On a CPU, a pool with a column for each head is read in blocks of all heads."""
    plain = args.valid is None and args.listed is None and not args.return_mass
    plain = plain and args.k.shape[1] == args.start.shape[1]
    if target_platform() == "cpu" and plain and not isinstance(args.k, Quantized) and not isinstance(args.v, Quantized):
        return *_attend(args, args.k, args.v), None
    if args.listed is not None:
        return _listed(args, args.listed)
    out, lse, mass = ragged.attend(args, args.length.reshape(-1))
    if mass is None:
        return out, lse, None
    mass = mass.reshape(*args.q.shape[:2], -1)
    return out, lse, jnp.pad(mass, [(0, 0), (0, 0), (0, args.max_length - mass.shape[-1])])


def _listed(args: DecodeArguments, core: Listed) -> Attended:
    """core_attention: the entries of a segment are the listed slots, then the text slots."""
    offsets, count, text, max_length = core.offsets, core.count, core.text, args.max_length
    (batch, listed), kv_heads = offsets.shape, args.start.shape[1]
    entries = count[:, None] + jnp.maximum(args.length - text, 0)

    def place_of(segment: Array, number: Array) -> Array:
        row = segment // kv_heads
        # Numbers are clipped to listed entries, because other slots must not be read, not even masked.
        entry = jnp.minimum(number, entries.reshape(-1)[segment] - 1)
        of_list = offsets.at[row, entry].get(mode="clip") if listed else 0
        return jnp.where(entry < count[row], of_list, text.reshape(-1)[segment] + entry - count[row])

    out, lse, mass = ragged.attend(args, entries.reshape(-1), place_of)
    if mass is None:
        return out, lse, None
    place, number, bound = jnp.arange(max_length), jnp.arange(listed), mass.shape[-1]
    listed_place = jnp.where(number < count[:, None], offsets, max_length)
    # For every slot the index of its entry, or `bound` if it has none.
    entry = jnp.full((batch, max_length), bound).at[jnp.arange(batch)[:, None], listed_place].set(number, mode="drop")
    where = jnp.where(place < text[..., None], entry[:, None], count[:, None, None] + place - text[..., None])
    where = where.reshape(-1, 1, max_length)
    spread = jax.vmap(lambda m, w: m.at[:, w[0]].get(mode="fill", fill_value=0.0))(mass, where)
    return out, lse, spread.reshape(*args.q.shape[:2], max_length)


def _attend(
    args: DecodeArguments, k: Float[Array, "B K P H"], v: Float[Array, "B K P H"]
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Attention and log of its denominator. Free slots must hold finite numbers."""
    q, start, length = args.q, args.start, args.length
    batch, kv_heads, slots, head_dim = k.shape
    most = min(slots, -(-args.max_length // _LEAST) * _LEAST)
    block = _block(most, kv_heads * head_dim * k.dtype.itemsize)
    grouped = q.reshape(batch, kv_heads, -1, head_dim)

    def read(pool: Array, at: Array) -> Float[Array, "B K C H"]:
        if block == slots:
            return pool
        return jax.vmap(jax.vmap(lambda of_head, at: jax.lax.dynamic_slice_in_dim(of_head, at, block)))(pool, at)

    def step(i: Int[Array, ""], state: _State | None = None) -> _State:
        pools, i = beside((k, v), i)
        begin = start + i * block
        at = jnp.minimum(begin, slots - block)  # the last block of a pool may overlap the one before
        place = at[..., None] + jnp.arange(block)
        inside = (place >= begin[..., None]) & (place < (start + length)[..., None])
        keys, values = (read(x, at) for x in pools)
        return jax.vmap(_add_block)(state, grouped, keys, values, inside)

    if block == most:  # no loop and no earlier state: XLA compiles and runs less
        state = step(jnp.int32(0))
    else:
        each = grouped.shape[:3]
        state = _State(jnp.zeros(grouped.shape), jnp.full(each, -jnp.inf), jnp.zeros(each))
        state = jax.lax.fori_loop(0, -(-jnp.max(length) // block), step, state)
    out, lse = normalized(*state)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _add_block(
    state: _State | None,
    q: Float[Array, "K G H"],
    keys: Float[Array, "K C H"],
    values: Float[Array, "K C H"],
    inside: Bool[Array, "K C"],
) -> _State:
    """The state of one row after a block of entries, of which those `inside` take part. None: no block came before."""
    each = state is not None and q.shape[1] <= _FEW
    x = _scores(q.astype(jnp.float32), keys.astype(jnp.float32), each) * q.shape[-1] ** -0.5
    x = jnp.where(inside[:, None], x, -jnp.inf)
    peak = jnp.max(x, axis=-1) if state is None else jnp.maximum(state.peak, jnp.max(x, axis=-1))
    shift = jnp.where(jnp.isfinite(peak), peak, 0.0)
    p = jnp.exp(x - shift[..., None])
    total, weight = jnp.einsum("kgc,kch->kgh", p, values.astype(jnp.float32)), jnp.sum(p, axis=-1)
    if state is not None:
        rest = jnp.exp(state.peak - shift)
        total, weight = state.total * rest[..., None] + total, state.weight * rest + weight
    return _State(total, peak, weight)


def _scores(q: Float[Array, "K G H"], keys: Float[Array, "K C H"], each: bool) -> Float[Array, "K G C"]:
    """Product of queries and keys: one product for each query of a group, or one for the group.

    For a product with a matrix, the CPU backend copies the keys into another layout, which takes longer than to read
    them once for each query. It compiles all products with a vector, even equal ones, and takes longer for those of a
    short segment than for the rest of a layer; so outside the loop there is one product.
    """
    if each:
        return jnp.stack([jnp.einsum("kch,kh->kc", keys, q[:, g]) for g in range(q.shape[1])], axis=1)
    x = jnp.einsum("kch,kgh->kcg", keys, q)
    return jax.lax.optimization_barrier(x).swapaxes(1, 2)  # XLA would exchange the operands: 6 times as long


def _block(slots: int, slot_bytes: int) -> int:
    fit = _BYTES // slot_bytes // _LEAST * _LEAST
    return min(slots, max(_LEAST, min(_MOST, fit)))
