"""attention_mass in plain XLA: a few query rows at a time against all keys that they may attend to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention_mass.reference import MassArguments

_BLOCK_ELEMENTS = 2**22  # logits held at a time, for one row of the batch
_GROUPS = 8  # if rows are in order, each group of rows reads only its own prefix of the keys


def attention_mass_xla(args: MassArguments) -> Float[Array, "R N S"]:
    """Implements `attention_mass`. `lse` is not needed: each block of rows holds all its logits."""
    q, k, row_weight, causal, in_order = args.q, args.k, args.row_weight, args.causal, args.in_order
    heads, rows, head_dim = q.shape
    keys = k.shape[1]
    block = max(1, min(rows, 512, _BLOCK_ELEMENTS // max(heads * keys, 1)))
    blocks = -(-rows // block)
    per_group = -(-blocks // _GROUPS) if causal and in_order else blocks
    pad = blocks * block - rows
    q = jnp.pad(q, [(0, 0), (0, pad), (0, 0)]).reshape(k.shape[0], -1, blocks, block, head_dim)
    weight = jnp.pad(row_weight.astype(jnp.float32), [(0, 0), (0, pad)]).reshape(-1, blocks, block)
    places = jnp.pad(args.row_place, [(0, pad)]).reshape(blocks, block)

    mass = jnp.zeros((row_weight.shape[0], k.shape[0], heads // k.shape[0], keys), jnp.float32)
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        seen = min(last * block, keys) if causal and in_order else keys

        def step(total, block_of, seen=seen):
            q_block, w, place = block_of  # [K, G, block, H], [R, block], [block]
            logits = jnp.einsum("kgth,ksh->kgts", q_block, k[:, :seen], preferred_element_type=jnp.float32)
            logits = logits * head_dim**-0.5
            allowed = jnp.broadcast_to(args.key_mask[:seen], (block, seen))
            if causal:
                allowed = allowed & (jnp.arange(seen) <= place[:, None])
            p = softmax_statistic(logits, allowed, args.softmax_n, args.statistic, args.threshold)
            return total + jnp.einsum("rt,kgts->rkgs", w, p), None

        part = jnp.zeros((*mass.shape[:-1], seen), jnp.float32)
        slices = (
            q[:, :, first:last].transpose(2, 0, 1, 3, 4),
            weight[:, first:last].transpose(1, 0, 2),
            places[first:last],
        )
        if last - first == 1:  # avoids compiling a loop
            part, _ = step(part, jax.tree.map(lambda x: x[0], slices))
        else:
            part, _ = jax.lax.scan(step, part, slices)
        mass = mass + jnp.pad(part, [(0, 0)] * 3 + [(0, keys - seen)])
    return mass.reshape(-1, heads, keys)


def softmax_statistic(
    logits: Float[Array, "*n S"], allowed: Bool[Array, "*#n S"], softmax_n: float, statistic: str, threshold: float
) -> Float[Array, "*n S"]:
    """Probabilities over the allowed keys (zeros if there are none), their squares, or which ones count."""
    peak = jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1, keepdims=True)
    # softmax_n acts like additional logits of value 0, so the shift must be at least 0 to avoid overflow.
    shift = jnp.maximum(peak, 0.0) if softmax_n else jnp.where(jnp.isfinite(peak), peak, 0.0)
    exponent = jnp.where(allowed, jnp.exp(logits - shift), 0.0)
    if statistic == "count":
        return (allowed & (exponent >= threshold * jnp.max(exponent, axis=-1, keepdims=True))).astype(jnp.float32)
    total = jnp.sum(exponent, axis=-1, keepdims=True) + (softmax_n * jnp.exp(-shift) if softmax_n else 0.0)
    p = exponent / jnp.where(total > 0, total, 1.0)
    return p**2 if statistic == "square" else p
