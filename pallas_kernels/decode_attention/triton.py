"""decode_attention in Triton, for A100 and H100: one program per row, key head and part of the segment.

Each segment is cut, according to its own length, into as many parts as fill the device. So every program has work for
short and long segments alike. Parts are merged by their log-sum-exps. The query heads of a group are the rows of one
product (padded to 16, which is free since memory is the limit), so each key and value is read once.

The slots may also be listed ones, followed by a dense rest (`core_attention`). They are read from where they are; an
entry is 128 bytes or more, so scattered entries use whole memory transactions, and nothing is copied first.

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · M bound on a segment · H head dim · Z parts ·
C listed slots · J slots of one iteration.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Int

from pallas_kernels import gpu
from pallas_kernels.decode_attention.reference import Attended, DecodeArguments
from pallas_kernels.quantized import Quantized

Listed = tuple[Int[Array, "B C"], Int[Array, " B"], Int[Array, "B K"]]  # offsets, count, text of core_attention


def unsupported(args: DecodeArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    if isinstance(args.k, Quantized) or isinstance(args.v, Quantized):
        return "it reads arrays only, not quantised pools"
    return gpu.unsupported(args.q, args.k, args.v)


def decode_attention_triton(args: DecodeArguments, *, interpret: bool = False) -> Attended:
    """Implements `decode_attention` in Triton."""
    return attend(args, None, interpret=interpret)


def attend(args: DecodeArguments, listed: Listed | None, *, interpret: bool = False) -> Attended:
    """Attention, log-sum-exp and mass over all slots of each segment, or over those of `listed`."""
    q, k, v, start, valid, max_length = args.q, args.k, args.v, args.start, args.valid, args.max_length
    batch, heads, head_dim = q.shape
    slots, kv_heads = k.shape[2], start.shape[1]
    group = heads // kv_heads
    op = "decode_attention" if listed is None else "core_attention"
    # Keys and values of two iterations are in shared memory while a third is read: 64 KiB at H = 128, in bfloat16.
    block = 64 if k.dtype.itemsize < 4 else 32
    parts = gpu.splits(batch * kv_heads, -(-max_length // block))

    seen = jnp.full((batch, kv_heads, group, max_length), -jnp.inf) if args.return_mass else None
    inputs = (q.reshape(batch, kv_heads, group, head_dim), k, v, start, args.length, listed, valid, seen)

    # A program has the indices (head, part, row). Each spec selects its part of an array by row and head.
    scalar = pl.BlockSpec((None, None), lambda head, part, row: (row, head))
    column = (lambda head: head) if k.shape[1] > 1 else lambda head: 0
    pool = pl.BlockSpec((None, None, slots, head_dim), lambda head, part, row: (row, column(head), 0, 0))
    queries = pl.BlockSpec((None, None, group, head_dim), lambda head, part, row: (row, head, 0, 0))
    listing = None if listed is None else (
        pl.BlockSpec((None, listed[0].shape[1]), lambda head, part, row: (row, 0)),
        pl.BlockSpec((None,), lambda head, part, row: (row,)),
        scalar,
    )  # fmt: skip
    mask = None if valid is None else pl.BlockSpec((None, None, max_length), lambda head, part, row: (row, head, 0))
    kept = None
    if seen is not None:
        kept = pl.BlockSpec((None, None, group, max_length), lambda head, part, row: (row, head, 0, 0))
    out = pl.BlockSpec((None, None, None, group, head_dim), lambda head, part, row: (part, row, head, 0, 0))
    sums = pl.BlockSpec((None, None, None, group), lambda head, part, row: (part, row, head, 0))
    out_shape = (
        jax.ShapeDtypeStruct((parts, batch, kv_heads, group, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((parts, batch, kv_heads, group), jnp.float32),
        None if seen is None else jax.ShapeDtypeStruct(seen.shape, jnp.float32),
    )
    run = gpu.pallas_call(
        functools.partial(_kernel, block=block, parts=parts),
        grid=(kv_heads, parts, batch),
        in_specs=(queries, pool, pool, scalar, scalar, listing, mask, kept),
        out_specs=(out, sums, kept),
        out_shape=out_shape,
        name=op,
        warps=4,
        stages=3,
        aliases=None if seen is None else {len(jax.tree.leaves(inputs)) - 1: 2},
        interpret=interpret,
    )
    parts_out, parts_lse, seen = run(*inputs)
    attended, lse = gpu.merge(parts_out, parts_lse[..., None]), gpu.total(parts_lse)
    mass = None
    if seen is not None:
        mass = jnp.exp(seen - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
        mass = mass.reshape(batch, heads, max_length)
    return attended.reshape(batch, heads, head_dim), lse.reshape(batch, heads), mass


def _kernel(
    q_ref,  # [G, H]
    k_ref,  # [P, H]
    v_ref,  # [P, H]
    start_ref,  # []
    length_ref,  # []
    listed_refs,  # [C], [], []; or None
    valid_ref,  # [M]; or None
    _,  # initial contents of seen_ref
    out_ref,  # [G, H]
    lse_ref,  # [G]
    seen_ref,  # [G, M]: logits; or None
    *,
    block: int,
    parts: int,
):
    group, head_dim = q_ref.shape
    start, length = start_ref[...], length_ref[...]
    if listed_refs is None:
        many = length
    else:
        rows_ref, count_ref, text_ref = listed_refs
        count, text = count_ref[...], text_ref[...]
        many = count + jnp.maximum(length - text, 0)
    part = jax.lax.div(many + (parts * block - 1), parts * block) * block  # slots of a part, in whole iterations
    begin = pl.program_id(1) * part
    end = jnp.minimum(begin + part, many)

    head = jnp.arange(gpu.padded(group))
    q = gpu.load_rows(q_ref, head, head < group)

    def places(i):  # offsets from `start` of the slots of iteration i, and which of them exist
        number = begin + i * block + jnp.arange(block)
        inside = number < end
        if listed_refs is None:
            return number, inside
        chosen = gpu.load(rows_ref, number, mask=inside & (number < count))
        place = jnp.where(number < count, chosen, text + number - count)
        return place, inside & (place < length)

    def step(i, state):
        out, peak, weight, place, inside = state
        following = places(i + 1)  # one iteration ahead, so that the copies of keys and values need not wait for it
        k = gpu.load_rows(k_ref, start + place, inside)
        v = gpu.load_rows(v_ref, start + place, inside)
        taken = inside
        if valid_ref is not None:
            taken = inside & gpu.load(valid_ref, place, mask=inside, other=False)
        logits = jnp.where(taken[None], gpu.logits(q, k, head_dim**-0.5), -jnp.inf)  # [G, J]
        if seen_ref is not None:
            mask = (head < group)[:, None] & inside[None]
            triton.store(seen_ref.at[head[:, None], place[None]], logits, mask=mask)
        both = jnp.maximum(peak, jnp.max(logits, axis=1))
        shift = jnp.where(both > -jnp.inf, both, 0.0)
        p = jnp.exp(logits - shift[:, None])
        old = jnp.exp(peak - shift)
        out = [a * old[:, None] + gpu.dot(p.astype(b.dtype), b) for a, b in zip(out, v, strict=True)]
        return out, both, weight * old + jnp.sum(p, axis=1), *following

    rows = head.shape[0]
    state = (
        [jnp.zeros((rows, size), jnp.float32) for _, size in gpu.tiles(head_dim)],
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        *places(0),
    )
    turns = jax.lax.div(end - begin + (block - 1), block)  # at most 0 past the end
    out, peak, weight, *_ = jax.lax.fori_loop(0, turns, step, state)
    some = weight > 0
    weight = jnp.where(some, weight, 1.0)
    gpu.store_rows(out_ref, head, head < group, [a / weight[:, None] for a in out])
    triton.store(lse_ref.at[head], jnp.where(some, peak + jnp.log(weight), -jnp.inf), mask=head < group)
