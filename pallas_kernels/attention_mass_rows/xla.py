"""attention_mass_rows in plain XLA: a few query rows at a time against all keys that they may attend to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention_mass.xla import softmax_statistic
from pallas_kernels.attention_mass_rows.reference import MassRowsArguments

_BLOCK_ELEMENTS = 2**22  # logits held at a time, for one row of the batch
_GROUPS = 8  # if rows are in order, each group of rows reads only its own prefix of the keys


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
