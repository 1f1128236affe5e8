"""attention_mass_rows in plain XLA: a few query rows at a time against all the keys that they may see."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BLOCK_ELEMENTS = 2**22  # logits held at a time, of one row of the batch
_GROUPS = 8  # rows in order: each group of rows sees only its own prefix of the keys


def attention_mass_rows_xla(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    key_weight: Float[Array, "R S"],
    key_mask: Bool[Array, " S"],
    row_place: Int[Array, " T"],
    *,
    causal: bool,
    in_order: bool,
    softmax_n: float,
) -> Float[Array, "R N T"]:
    """As `attention_mass_rows` says. `in_order`: row t stands at place t, so a prefix of rows needs one of keys."""
    heads, rows, head_dim = q.shape
    keys = k.shape[1]
    block = max(1, min(rows, 512, _BLOCK_ELEMENTS // max(heads * keys, 1)))
    blocks = -(-rows // block)
    per_group = -(-blocks // _GROUPS) if causal and in_order else blocks
    pad = blocks * block - rows
    q = jnp.pad(q, [(0, 0), (0, pad), (0, 0)]).reshape(k.shape[0], -1, blocks, block, head_dim)
    q = q.transpose(2, 0, 1, 3, 4)
    places = jnp.pad(row_place, [(0, pad)]).reshape(blocks, block)
    weight = key_weight.astype(jnp.float32)

    parts = []
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        seen = min(last * block, keys) if causal and in_order else keys

        def give(args, seen=seen):
            q_block, place = args  # [K, G, block, H], [block]
            logits = jnp.einsum("kgth,ksh->kgts", q_block, k[:, :seen], preferred_element_type=jnp.float32)
            allowed = jnp.broadcast_to(key_mask[:seen], (block, seen))
            if causal:
                allowed = allowed & (jnp.arange(seen) <= place[:, None])
            p = _softmax(logits * head_dim**-0.5, allowed, softmax_n)
            return jnp.einsum("rs,kgts->rkgt", weight[:, :seen], p)

        slices = q[first:last], places[first:last]
        if last - first == 1:  # no loop to compile
            parts.append(give(jax.tree.map(lambda x: x[0], slices))[None])
        else:
            parts.append(jax.lax.map(give, slices))
    mass = jnp.concatenate(parts).transpose(1, 2, 3, 0, 4)  # [R, K, G, blocks, block]
    return mass.reshape(-1, heads, blocks * block)[..., :rows]


def _softmax(logits, allowed, softmax_n):
    peak = jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1, keepdims=True)
    # With an n in the denominator 0 takes part as one more logit, so the shift must not fall below it.
    shift = jnp.maximum(peak, 0.0) if softmax_n else jnp.where(jnp.isfinite(peak), peak, 0.0)
    exponent = jnp.where(allowed, jnp.exp(logits - shift), 0.0)
    total = jnp.sum(exponent, axis=-1, keepdims=True) + (softmax_n * jnp.exp(-shift) if softmax_n else 0.0)
    return exponent / jnp.where(total > 0, total, 1.0)
