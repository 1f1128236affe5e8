"""decode_attention for TPU: one pass over the segments, blocks of slots copied from HBM while the last one is used.

A slot's K heads lie together in a pool [P, K, H], so the pool is read as rows of [P K, H] (a bitcast where K is a
power of two and H fills the lanes) and all heads of a block at once: q [N, H] against [C K, H] is one matrix product,
in which head n uses the columns of its own key head and the rest are masked. The matrix unit streams those rows in any
case; memory bounds the whole. Heads whose segments begin together share a pass, as they do in every method that gives
the heads of a layer one budget; each further start costs one more pass over all heads of its segment.

Copies are of whole blocks, the last of a segment in units of 16 slots: what is read is what is used, rounded up to a
tile. The next copy is under way while a block is computed, across rows of the batch too. Where the device has two
cores each takes half of every row's blocks, joined by their log-sum-exp.

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · M bound on a segment · H head dim ·
C slots of a chunk · R = C K its rows · Z cores.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.quantized import QuantizedPool
from pallas_kernels.tpu import FLOOR, LANES, MASKED, cores, dot, dot_exact, interpreter

_UNIT = 16  # slots: a segment begins on a bfloat16 tile
_BUFFER_BYTES = 2**19  # of keys in a block: long enough a copy to reach the memory's speed
_VMEM_BYTES = 15 * 2**20  # of 16 MiB that a kernel may use on every generation


def decode_attention_mosaic_tpu(
    q: Float[Array, "B N H"],
    k: Float[Array, "B P K H"] | QuantizedPool,
    v: Float[Array, "B P K H"] | QuantizedPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    valid: Bool[Array, "B K M"] | None,
    max_length: int,
    return_mass: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """As `decode_attention` says. Blocks in which no slot is valid are not read."""
    assert not isinstance(k, QuantizedPool) and not isinstance(v, QuantizedPool)
    (batch, heads, head_dim), (_, slots, kv_heads, _) = q.shape, k.shape
    masked = valid is not None
    unit, chunk, block = _sizes(slots, kv_heads, head_dim, k.dtype.itemsize, masked or return_mass)
    most = min(max_length, slots)
    blocks = -(-min(most + unit - 1, slots) // block)
    split = 1 if blocks == 1 else cores()
    start, length = start.astype(jnp.int32), jnp.clip(length, 0, most).astype(jnp.int32)
    first = start // unit * unit
    units, ends = _passes(start, jnp.where(length > 0, -(-(start - first + length) // unit), 0), block // unit)
    shift = start - first

    group = heads // kv_heads
    head = jnp.broadcast_to(jnp.arange(heads) // group, (batch, heads))
    bounds = jnp.stack([jnp.repeat(start, group, 1), jnp.repeat(start + length, group, 1), head], axis=-1)
    row = jnp.arange(chunk * kv_heads)
    columns = jnp.stack([row // kv_heads, row % kv_heads])
    scalars = [x.reshape(-1) for x in (start, units, ends)]
    constant = pl.BlockSpec(None, lambda *_: (0, 0))
    inputs = [q, bounds.astype(jnp.int32), columns.astype(jnp.int32)]
    in_specs = [
        pl.BlockSpec((1, heads, head_dim), lambda z, b, *_: (b, 0, 0)),
        pl.BlockSpec((1, heads, 3), lambda z, b, *_: (b, 0, 0)),
        constant,
    ]
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs += [x.reshape(batch, slots * kv_heads, head_dim) for x in (k, v)]
    in_specs += [hbm, hbm]
    buffers = [pltpu.VMEM((2, block * kv_heads, head_dim), x.dtype) for x in (k, v)]
    if masked or return_mass:
        inputs.append((columns[0] == jnp.arange(chunk)[:, None]).astype(jnp.bfloat16))
        in_specs.append(constant)
    if valid is not None:
        valid = valid[..., :most] & (jnp.arange(most) < length[..., None])
        moved = _move(valid, shift, blocks * block)
        scalars.append(jnp.any(moved.reshape(batch, kv_heads, blocks, block), axis=(1, 3)).reshape(-1))
        inputs.append(moved.astype(jnp.bfloat16))
        in_specs.append(hbm)
        buffers.append(pltpu.VMEM((2, kv_heads, block), jnp.bfloat16))
    out_shape = [(split, batch, heads, head_dim), (split, batch, heads, LANES)]
    out_shape += [(split, batch, heads, blocks * block)] * return_mass
    out_specs = [pl.BlockSpec((1, 1, *shape[2:]), lambda z, b, *_: (z, b, 0, 0)) for shape in out_shape]
    kernel = functools.partial(
        _kernel, kv_heads=kv_heads, unit=unit, chunk=chunk, block=block, blocks=blocks, batch=batch, masked=masked,
        return_mass=return_mass,
    )  # fmt: skip
    out, lse, *raw = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(split, batch),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[*buffers, pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((3, 2))],
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out_shape],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpreter(interpret),
        name="decode_attention",
    )(*(x.astype(jnp.int32) for x in scalars), *inputs)
    out, lse = _join(out, lse[..., 0])
    if not return_mass:
        return out, lse, None
    logits = _move(jnp.sum(raw[0], axis=0), -jnp.repeat(shift, group, 1), max_length)
    inside = jnp.arange(max_length) < length[..., None] if valid is None else _fit(valid, max_length)
    inside = jnp.repeat(inside, group, 1)
    mass = jnp.where(inside, jnp.exp(jnp.where(inside, logits - lse[..., None], 0.0)), 0.0)
    return out, lse, mass


def unsupported(
    q: Array,
    k: Array | QuantizedPool,
    v: Array | QuantizedPool,
    start: Array,
    length: Array,
    valid: Array | None,
    max_length: int,
    return_mass: bool,
) -> str | None:
    """Why the kernel cannot take these arguments; None: it can."""
    if isinstance(k, QuantizedPool) or isinstance(v, QuantizedPool):
        return "the pool is quantised"
    if k.dtype != v.dtype or k.dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys are {k.dtype} and values {v.dtype}, not both bfloat16 or both float32"
    slots, kv_heads, head_dim = k.shape[1:]
    lined_up = valid is not None or return_mass
    unit, chunk, block = _sizes(slots, kv_heads, head_dim, k.dtype.itemsize, lined_up)
    if slots % _UNIT and slots > LANES:
        return f"a pool of {slots} slots is not a multiple of {_UNIT}"
    rows, heads = kv_heads * chunk, q.shape[1]
    need = 4 * block * kv_heads * _padded(head_dim) * k.dtype.itemsize  # keys and values, this block and the next
    need += 16 * heads * rows  # logits, their exponentials, masks
    need += 4 * chunk * rows * lined_up + 8 * heads * (min(max_length, slots) + block) * return_mass
    if need > _VMEM_BYTES:
        return f"blocks of {block} slots with {kv_heads} key heads of {head_dim} and a segment of {max_length} need {need >> 20} MiB of VMEM"
    return None


def _sizes(slots: int, kv_heads: int, head_dim: int, itemsize: int, lined_up: bool) -> tuple[int, int, int]:
    """Slots of a unit, a chunk and a block; `lined_up`: they are lanes of a mask or of the mass as well."""
    if slots <= LANES:
        return slots if slots % _UNIT else _UNIT, slots, slots
    chunk = LANES if lined_up else min(max(2048 // kv_heads // _UNIT, 1), slots // _UNIT, 32) * _UNIT
    chunk_bytes = chunk * kv_heads * _padded(head_dim) * itemsize
    return _UNIT, chunk, max(1, min(_BUFFER_BYTES // chunk_bytes, slots // chunk)) * chunk


def _padded(head_dim: int) -> int:
    return -(-head_dim // LANES) * LANES


def _passes(start: Any, units: Any, per_block: int) -> tuple[Any, Any]:
    """Heads that begin together share the pass of the first of them: units of each pass, blocks up to its end."""
    heads = jnp.arange(start.shape[1])
    together = start[:, :, None] == start[:, None, :]  # [B, K, K]
    leader = ~jnp.any(together & (heads[None, :] < heads[:, None]), axis=-1)
    units = jnp.where(leader, jnp.max(jnp.where(together, units[:, None], 0), axis=-1), 0)
    blocks = -(-units // per_block)
    return units, jnp.sum(jnp.where(heads[None, :] <= heads[:, None], blocks[:, None], 0), axis=-1)


def _move(x: Any, by: Any, room: int) -> Any:
    """x [B, K, M] moved `by` [B, K] places up, into `room` places, what is new zero; free where no head moves."""

    def gather(x):
        place = jnp.arange(room) - by[..., None]
        taken = jnp.take_along_axis(x, jnp.clip(place, 0, x.shape[-1] - 1), axis=-1)
        return jnp.where((place >= 0) & (place < x.shape[-1]), taken, jnp.zeros((), x.dtype))

    return jax.lax.cond(jnp.any(by != 0), gather, lambda x: _fit(x, room), x)


def _fit(x: Any, room: int) -> Any:
    """The last axis cut or filled up to `room` places."""
    return jnp.pad(x[..., :room], [(0, 0)] * (x.ndim - 1) + [(0, max(0, room - x.shape[-1]))])


def _join(out: Any, lse: Any) -> tuple[Any, Any]:
    """Attention over all from attention over each core's part, [Z, B, N, H] and [Z, B, N]."""
    if len(out) == 1:
        return out[0], lse[0]
    total = jnp.logaddexp(lse[0], lse[1])
    share = jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0))
    return jnp.sum(out * share[..., None], axis=0), total


def _kernel(*refs, kv_heads, unit, chunk, block, blocks, batch, masked, return_mass):
    refs = iter(refs)
    starts, units, ends = (next(refs) for _ in range(3))  # [B K]
    wanted = next(refs) if masked else None  # [B blocks]
    q_ref, bounds_ref, columns_ref, k_hbm, v_hbm = (next(refs) for _ in range(5))
    spread_ref = next(refs) if masked or return_mass else None  # [C, R]: which slot a row is of
    valid_hbm = next(refs) if masked else None
    out_ref, lse_ref = next(refs), next(refs)
    raw_ref = next(refs) if return_mass else None  # logits, counted from the unit in which the segment begins
    k_buffer, v_buffer = next(refs), next(refs)
    valid_buffer = next(refs) if masked else None
    turn, semaphores = refs
    core, row, split = pl.program_id(0), pl.program_id(1), pl.num_programs(0)
    per_block = block // unit

    single = blocks * block == chunk  # a small pool, whose one chunk, perhaps one unit, need not fill any tiles

    def at(begin, of, count, *, known):
        return pl.ds(0, count) if known else pl.ds(pl.multiple_of(begin, of), count)

    def share(b):  # visits of this core in row b; at least one, so that each row knows what comes after it
        per_core = pl.cdiv(ends[b * kv_heads + kv_heads - 1], split)
        return core * per_core, jnp.maximum(per_core, 1)

    def locate(b, i):
        """Visit i of row b: its pass, its block of that pass and how many units of it there are to read."""
        first, last = b * kv_heads, (b + 1) * kv_heads - 1
        one = jax.lax.while_loop(lambda h: (h < last) & (ends[h] <= i), lambda h: h + 1, first)
        index = i - (ends[one] - pl.cdiv(units[one], per_block))
        size = jnp.clip(units[one] - index * per_block, 0, per_block)
        if masked:
            size = jnp.where(wanted[b * blocks + jnp.clip(index, 0, blocks - 1)] > 0, size, 0)
        return starts[one], jnp.minimum(index, blocks - 1), size

    def copies(b, i, slot, act):
        begin, index, size = locate(b, i)

        def both(place, count, into):
            for n, (source, buffer) in enumerate(((k_hbm, k_buffer), (v_hbm, v_buffer))):
                rows, target = (at(x * kv_heads, unit * kv_heads, count * kv_heads, known=single and unit == block)
                                for x in (place, into))  # fmt: skip
                act(pltpu.make_async_copy(source.at[b, rows], buffer.at[slot, target], semaphores.at[n, slot]))

        place = begin // unit * unit + index * block
        if masked:

            @pl.when(size > 0)
            def _():
                lanes = at(index * block, block, block, known=single)
                act(pltpu.make_async_copy(valid_hbm.at[b, :, lanes], valid_buffer.at[slot], semaphores.at[2, slot]))

        pl.when(size == per_block)(lambda: both(place, block, 0))

        @pl.when(size < per_block)
        def _():
            jax.lax.fori_loop(0, size, lambda u, _: (both(place + u * unit, unit, u * unit), None)[1], None)

    low, count = share(row)

    @pl.when(row == 0)
    def _():
        v_buffer[...] = jnp.zeros_like(v_buffer)  # what no copy has filled is multiplied by zero, which not all is
        turn[0] = 0
        copies(row, low, 0, lambda copy: copy.start())

    q, bounds, columns = q_ref[0], bounds_ref[0], columns_ref[...]
    scale = q.shape[-1] ** -0.5
    own = columns[1:2] == bounds[:, 2:3]  # [N, R]
    of_head = columns[1:2] == jax.lax.broadcasted_iota(jnp.int32, (kv_heads, 1), 0) if masked else None

    def visit(i, state):
        slot = turn[0] % 2
        last = i + 1 == low + count

        @pl.when(~last)
        def _():
            copies(row, i + 1, 1 - slot, lambda copy: copy.start())

        @pl.when(last & (row + 1 < batch))
        def _():
            copies(row + 1, share(row + 1)[0], 1 - slot, lambda copy: copy.start())

        copies(row, i, slot, lambda copy: copy.wait())
        begin, index, size = locate(row, i)
        place = begin // unit * unit + index * block
        ours = bounds[:, 0:1] == begin  # heads of this pass
        end = jnp.where(ours, bounds[:, 1:2], 0)

        def attend(c, state):
            peak, weight, total = state
            rows = at(c * chunk * kv_heads, unit * kv_heads, chunk * kv_heads, known=single)
            logits = dot(q, k_buffer[slot, rows], (1, 1)) * scale  # [N, R]
            slots = columns[0:1] + (place + c * chunk)
            inside = own & (slots >= bounds[:, 0:1]) & (slots < end)
            if masked:
                lanes = at(c * chunk, chunk, chunk, known=single)
                chosen = dot(valid_buffer[slot, :, lanes], spread_ref[...], (1, 0))  # [K, R]
                inside = inside & (jnp.max(jnp.where(of_head, chosen, 0.0), axis=0, keepdims=True) > 0.5)
            if return_mass:
                lanes = at(index * block + c * chunk, chunk, chunk, known=single)
                seen = dot_exact(jnp.where(inside, logits, 0.0), spread_ref[...], (1, 1))  # [N, C]
                raw_ref[0, 0, :, lanes] = jnp.where(ours, seen, raw_ref[0, 0, :, lanes])
            logits = jnp.where(inside, logits, MASKED)
            both = jnp.maximum(peak, jnp.max(logits, axis=-1, keepdims=True))
            old, p = jnp.exp(peak - both), jnp.exp(logits - both)
            values = v_buffer[slot, rows]
            total = total * old + dot(p.astype(values.dtype), values, (1, 0))
            return both, weight * old + jnp.sum(p, axis=-1, keepdims=True), total

        state = jax.lax.fori_loop(0, pl.cdiv(size * unit, chunk), attend, state)
        turn[0] += 1
        return state

    if return_mass:
        raw_ref[...] = jnp.zeros_like(raw_ref)
    heads, head_dim = q.shape
    state = (jnp.full((heads, 1), FLOOR), jnp.zeros((heads, 1)), jnp.zeros((heads, head_dim)))
    peak, weight, total = jax.lax.fori_loop(low, low + count, visit, state)
    some = weight > 0
    weight = jnp.where(some, weight, 1.0)
    out_ref[0, 0] = total / weight
    lse_ref[0, 0] = jnp.broadcast_to(jnp.where(some, peak + jnp.log(weight), -jnp.inf), (heads, LANES))
