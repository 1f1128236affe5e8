"""decode_attention in Triton, for A100 and H100: one program per row, key head and part of the segment.

Each segment is cut, according to its own length, into as many parts as fill the device. So every program has work for
short and long segments alike. Parts are merged by their log-sum-exps. The query heads of a group are the rows of one
product (padded to 16, which is free since memory is the limit), so each key and value is read once.

core_attention is the same kernel, which maps the number of an entry to its slot: the first `count` entries are the
listed slots, the others the text slots in order. Parts are cut from both together. Listed slots are not copied first:
an entry is 128 bytes or more, so scattered entries use whole memory transactions.

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · M bound on a segment · H head dim · Z parts ·
C listed slots · J slots of one iteration.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import gpu
from pallas_kernels.decode_attention.reference import Attended, DecodeArguments
from pallas_kernels.denominator import join
from pallas_kernels.quantized import Quantized


def unsupported(args: DecodeArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    if isinstance(args.k, Quantized) or isinstance(args.v, Quantized):
        return "it reads arrays only, not quantised pools"
    return gpu.unsupported(args.q, args.k, args.v)


class _Inputs(NamedTuple):
    """What the kernel reads; in comments the part of one program."""

    q: Any  # [G, H]
    k: Any  # [P, H]
    v: Any  # [P, H]
    start: Any  # []
    length: Any  # []
    listed: Any  # [C], [], []; or None
    valid: Any  # [M]; or None
    logits: Any  # initial contents of the output; or None


class _Outputs(NamedTuple):
    """What it writes."""

    out: Any  # [G, H]
    lse: Any  # [G]
    logits: Any  # [G, M]; or None


def decode_attention_triton(args: DecodeArguments, *, interpret: bool = False) -> Attended:
    """Implements `decode_attention` in Triton."""
    q, k, v, start, max_length = args.q, args.k, args.v, args.start, args.max_length
    (batch, heads, head_dim), kv_heads = q.shape, start.shape[1]
    # Keys and values of two iterations are in shared memory while a third is read: 64 KiB at H = 128, in bfloat16.
    block = 64 if k.dtype.itemsize < 4 else 32
    parts = gpu.splits(batch * kv_heads, -(-max_length // block))

    grouped = q.reshape(batch, kv_heads, -1, head_dim)
    each = grouped.shape[:3]
    logits = jnp.full((*each, max_length), -jnp.inf) if args.return_mass else None
    listed, listing = None, None
    if args.listed is not None:
        offsets, count, text = args.listed.offsets, args.listed.count, args.listed.text
        if not offsets.shape[1]:  # Triton does not accept an empty array
            offsets = jnp.zeros((batch, 1), offsets.dtype)
        listed, listing = (offsets, count, text), (gpu.part(offsets, 2), gpu.part(count, 2), gpu.part(text, 2, 0))
    inputs = _Inputs(grouped, k, v, start, args.length, listed, args.valid, logits)
    out_shape = _Outputs(
        jax.ShapeDtypeStruct((parts, *each, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((parts, *each), jnp.float32),
        None if logits is None else jax.ShapeDtypeStruct(logits.shape, jnp.float32),
    )
    # A program has the indices (head, part, row).
    by_head = jax.tree.map(lambda x: gpu.part(x, 2, 0), inputs._replace(listed=None))
    pool = gpu.part(k, 2, 0 if k.shape[1] > 1 else lambda *_: 0)
    out_specs = _Outputs(gpu.part(out_shape.out, 1, 2, 0), gpu.part(out_shape.lse, 1, 2, 0), by_head.logits)
    (parts_out, parts_lse, logits) = pl.pallas_call(
        lambda inputs, *outputs: _kernel(inputs, _Outputs(*outputs), block=block, parts=parts),
        grid=(kv_heads, parts, batch),
        in_specs=(by_head._replace(k=pool, v=pool, listed=listing),),
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases={} if logits is None else {len(jax.tree.leaves(inputs)) - 1: 2},
        compiler_params=gpu.PARAMETERS,
        name=args.op,
        interpret=interpret,
    )(inputs)
    attended, lse = join(parts_out, parts_lse, axis=-1)
    mass = None
    if logits is not None:
        mass = jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
        mass = mass.reshape(batch, heads, max_length)
    return attended.reshape(batch, heads, head_dim), lse.reshape(batch, heads), mass


def _kernel(inputs: _Inputs, outputs: _Outputs, *, block: int, parts: int) -> None:
    group, head_dim = inputs.q.shape
    count, place_of = _entries(inputs)
    begin, end, turns = gpu.share(count, parts, block, axis=1)
    start = inputs.start[...]
    head = jnp.arange(gpu.padded(group))
    q = gpu.load_rows(inputs.q, head, head < group)

    def places(i: Any) -> tuple[Any, Any]:
        number = begin + i * block + jnp.arange(block)
        return place_of(number, number < end)

    def step(i: Any, state: Any) -> Any:
        out, peak, weight, place, inside = state
        following = places(i + 1)  # one iteration ahead, so that the copies of keys and values need not wait for it
        k = gpu.load_rows(inputs.k, start + place, inside)
        v = gpu.load_rows(inputs.v, start + place, inside)
        allowed = inside
        if inputs.valid is not None:
            allowed = inside & gpu.load(inputs.valid, place, mask=inside, other=False)
        logits = jnp.where(allowed[None], gpu.logits(q, k, head_dim**-0.5), -jnp.inf)  # [G, J]
        if outputs.logits is not None:
            mask = (head < group)[:, None] & inside[None]
            triton.store(outputs.logits.at[head[:, None], place[None]], logits, mask=mask)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
        shift = jnp.where(new_peak > -jnp.inf, new_peak, 0.0)
        p = jnp.exp(logits - shift[:, None])
        rescale = jnp.exp(peak - shift)
        out = [a * rescale[:, None] + gpu.dot(p.astype(b.dtype), b) for a, b in zip(out, v, strict=True)]
        return out, new_peak, weight * rescale + jnp.sum(p, axis=1), *following

    rows = head.shape[0]
    state = (
        [jnp.zeros((rows, size), jnp.float32) for _, size in gpu.tiles(head_dim)],
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        *places(0),
    )
    out, peak, weight, *_ = jax.lax.fori_loop(0, turns, step, state)
    filled = weight > 0
    weight = jnp.where(filled, weight, 1.0)
    gpu.store_rows(outputs.out, head, head < group, [a / weight[:, None] for a in out])
    triton.store(outputs.lse.at[head], jnp.where(filled, peak + jnp.log(weight), -jnp.inf), mask=head < group)


def _entries(inputs: _Inputs) -> tuple[Any, Callable[[Any, Any], tuple[Any, Any]]]:
    """The number of entries of a segment, and what maps numbers of entries to offsets from `start`.

    The second argument of this function, and its second result, are masks of the entries that exist.
    """
    length = inputs.length[...]
    if inputs.listed is None:
        return length, lambda number, inside: (number, inside)
    offsets, count, text = inputs.listed[0], inputs.listed[1][...], inputs.listed[2][...]

    def place_of(number: Any, inside: Any) -> tuple[Any, Any]:
        listed = gpu.load(offsets, number, mask=inside & (number < count))
        place = jnp.where(number < count, listed, text + number - count)
        return place, inside & (place < length)

    return count + jnp.maximum(length - text, 0), place_of
