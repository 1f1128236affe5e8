"""Attention to a layer of a cache with a decode state, which also returns the share of each entry.

Axes: as in `decode_state.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import Kernels, Quantized, core_attention, decode_attention
from vlkv.cache.decode_state import DecodeState
from vlkv.sharding import ops


@partial(jax.jit, static_argnames=("softmax_n", "kernels", "parts"))
def attend_to(
    q: Float[Array, "B N H"],
    segment: tuple[Array | Quantized, Array | Quantized, Array, Array],
    tail: tuple[Array, Array] | None,
    tail_count: Int[Array, " B"],
    state: DecodeState,
    *,
    softmax_n: float = 0.0,
    kernels: Kernels | None = None,
    parts: int = 1,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N E"]]:
    """Attention to `state.attended`, and the share of attention that every entry received. Batched.

    Args:
        q: queries of this step.
        segment: keys and values of the pool, start and length of this layer's segment.
        tail: keys and values of this layer's tail; None: slots are reused.
        tail_count: number of entries in the tail.
        state: the decode state after `arrive`.
        softmax_n: n of n-softmax over segment and tail together.
        kernels: implementations; None: those of the platform.
        parts: as in `PackedCache`.
    """
    kernels = Kernels() if kernels is None else kernels
    in_segment = state.stored.shape[-1] - state.tail  # number of entries
    segment_mask, tail_mask = state.attended[..., :in_segment], state.attended[..., in_segment:]
    core = () if state.core is None else jax.vmap(_listed)(state)

    def local(
        part: ops.Part, q: Array, segment: Any, tail: Any, tail_count: Array, masks: Any, core: Any
    ) -> tuple[Array, ...]:
        """Computes this device's rows, heads and slots."""
        k, v, start, length = segment
        segment_mask, tail_mask = map(part.local_entries, masks)
        here = q, k, v, start, part.local_count(length)
        most = segment_mask.shape[-1]

        def whole() -> tuple[Array, Array, Array]:
            return decode_attention(
                *here, valid=segment_mask, max_length=most, return_mass=True, implementation=kernels.decode_attention
            )

        def listed() -> tuple[Array, Array, Array]:
            offsets, count = part.listed(*core[:2])
            return core_attention(
                *here, offsets, count, part.local_count(core[2]), valid=segment_mask, max_length=most, return_mass=True,
                implementation=kernels.core_attention,
            )  # fmt: skip

        if not core:
            out, lse, mass = whole()
        else:  # after `extend`, rows may be at different steps; then all rows use the whole segment
            out, lse, mass = jax.lax.cond(jnp.all(core[-1]), listed, whole)
        pieces, masses, sizes = [(out, lse)], [mass], [in_segment]
        if tail is not None:
            nothing = jnp.zeros_like(start)
            out, lse, mass = decode_attention(
                q, tail[0], tail[1], nothing, nothing + part.local_count(tail_count)[:, None], valid=tail_mask,
                max_length=tail_mask.shape[-1], return_mass=True, implementation=kernels.decode_attention,
            )  # fmt: skip
            pieces, masses, sizes = [*pieces, (out, lse)], [*masses, mass], [*sizes, state.tail]
        out, total = part.combine(pieces[0], pieces[1] if pieces[1:] else None, softmax_n)
        shares = (mass * jnp.exp(lse - total)[..., None] for mass, (_, lse) in zip(masses, pieces, strict=True))
        whole_shares = [part.gather_entries(x, size) for x, size in zip(shares, sizes, strict=True)]
        return out, jnp.concatenate(whole_shares, axis=-1)

    if tail is None:  # slots after the last attended entry need not be read
        number = jnp.arange(1, in_segment + 1)
        segment = *segment[:3], jnp.max(jnp.where(segment_mask, number, 0), axis=-1)
    pool, mask, listed = "B K P H", "B K E", ("B C", "B", "B K", "B")
    run = ops.split(
        local, ("B N H", (pool, pool, "B K", "B K"), None if tail is None else (pool, pool), "B", mask,
              listed if core else ()),
        ("B N H", "B N E"), batch=q.shape[0], kv_heads=segment_mask.shape[1], parts=parts,
    )  # fmt: skip
    return run(q, segment, tail, tail_count, (segment_mask, tail_mask), core)


def _listed(state: DecodeState) -> tuple[Array, Array, Array, Array]:
    """Arguments of `core_attention`: core entries, their number, and the first text slot; and whether it can be used.

    The list of core entries must be the same for all heads. Heads may differ if another method selects the
    stored entries. Then every step reads the whole segment with the mask `attended`, with the same result.
    """
    assert state.core is not None and state.core_only is not None
    inside = slice(0, state.stored.shape[1] - state.tail)
    text = state.is_text[:, inside]
    vision = state.core[:, inside] & ~text
    (offsets,) = jnp.nonzero(vision[0], size=vision.shape[1], fill_value=0)
    first = jnp.where(jnp.any(text, axis=1), jnp.argmax(text, axis=1), vision.shape[1])  # vision comes first
    return (
        offsets.astype(jnp.int32), jnp.sum(vision[0], dtype=jnp.int32), first.astype(jnp.int32),
        state.core_only & jnp.all(vision == vision[0]),
    )  # fmt: skip
