"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", Eq. 10), in float32.

Each value head has a memory M [H, V], which is read with queries and written with keys. For each token,

    M = exp(g) M + k (b (v - exp(g) M^T k))^T        o = M^T q

where g <= 0 is the logarithm of the decay, and b is the share of the old value of k that the new one replaces. A token
with g = b = 0 changes nothing. Prompts are processed in chunks: within one, the written values follow from a triangular
system, and all other work is products of matrices (the paper's Sec. 3.3); between chunks, the memory is carried.

Axes: B batch · T tokens · K key heads · G value heads that share a key head · N = K G · H channels of a key ·
V channels of a value · C tokens of a chunk · n chunks.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.lax.linalg import triangular_solve
from jaxtyping import Array, Float

CHUNK = 64  # the most tokens of a chunk
# Otherwise a TPU rounds the factors to bfloat16 and a GPU to TF32, and errors in the memory stay.
_einsum = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def delta_rule(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T N V"],
    decay: Float[Array, "B T N"],
    rate: Float[Array, "B T N"],
    memory: Float[Array, "B N H V"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]:
    """What each token reads, after it has written; and the memory after the last one.

    Args:
        q: queries.
        k: keys, of length 1 or less.
        v: values.
        decay: g.
        rate: b, from 0 to 1.
        memory: before the first token.
    """
    (batch, length, groups, _), heads = k.shape, v.shape[2]
    q, k, v, decay, rate, memory = (x.astype(jnp.float32) for x in (q, k, v, decay, rate, memory))
    v, decay, rate = (x.reshape(batch, length, groups, heads // groups, *x.shape[3:]) for x in (v, decay, rate))
    memory = memory.reshape(batch, groups, heads // groups, *memory.shape[2:])
    run = _step if length == 1 else _in_chunks
    out, memory = run(q, k, v, decay, rate, memory)
    return out.reshape(batch, length, heads, -1), memory.reshape(batch, heads, *memory.shape[3:])


def _step(
    q: Float[Array, "B 1 K H"],
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K G V"],
    decay: Float[Array, "B 1 K G"],
    rate: Float[Array, "B 1 K G"],
    memory: Float[Array, "B K G H V"],
) -> tuple[Float[Array, "B 1 K G V"], Float[Array, "B K G H V"]]:
    """One token. Its query and its key read the old memory together, which is then written once."""
    kept = jnp.exp(decay[:, 0])[..., None]
    old = _einsum("btkh,bkghv->tbkgv", jnp.concatenate([k, q], axis=1), memory) * kept
    new = rate[:, 0, ..., None] * (v[:, 0] - old[0])
    out = old[1] + jnp.sum(q * k, axis=-1)[:, 0, :, None, None] * new
    return out[:, None], memory * kept[..., None] + k[:, 0, :, None, :, None] * new[..., None, :]


def _in_chunks(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K G V"],
    decay: Float[Array, "B T K G"],
    rate: Float[Array, "B T K G"],
    memory: Float[Array, "B K G H V"],
) -> tuple[Float[Array, "B T K G V"], Float[Array, "B K G H V"]]:
    """Many tokens."""
    length = q.shape[1]
    size = min(CHUNK, length)
    until, later = jnp.tri(size, dtype=jnp.float32), jnp.tri(size, k=-1, dtype=bool)

    def cut(x: Float[Array, "B T ..."]) -> Float[Array, "n B C ..."]:
        x = jnp.pad(x, [(0, 0), (0, -length % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 0, 1)

    def chunk(memory: Float[Array, "B K G H V"], x: tuple[Array, ...]) -> tuple[Array, Float[Array, "B K G C V"]]:
        q, k, v, decay, rate = x
        v, decay, rate = jnp.moveaxis(v, 1, -2), jnp.moveaxis(decay, 1, -1), jnp.moveaxis(rate, 1, -1)[..., None]
        # Sums of the decays from each token d to each later token c. They are not differences of sums from the chunk's
        # start, which after fast decay are large and therefore imprecise.
        between = _einsum("ce,bkged->bkgcd", until, jnp.where(later, decay[..., None], 0.0))
        kept = jnp.exp(between[..., :1] + decay[..., :1, None])  # of the old memory, at each token
        between = until * jnp.exp(until * between)
        both = jnp.stack([k, q])
        alike, read = _einsum("xbckh,bdkh->xbkcd", both, k)[:, :, :, None] * between
        old, out = _einsum("xbckh,bkghv->xbkgcv", both, memory) * kept
        # What the tokens write: (1 + the part of rate alike below the diagonal) new = rate (v - old).
        new = triangular_solve(rate * alike, rate * (v - old), left_side=True, lower=True, unit_diagonal=True)
        out = out + _einsum("bkgcd,bkgdv->bkgcv", read, new)
        left = between[..., -1, :, None] * new  # at the end of the chunk
        return memory * kept[..., -1:, :] + _einsum("bckh,bkgcv->bkghv", k, left), out

    memory, out = jax.lax.scan(chunk, memory, tuple(map(cut, (q, k, v, decay, rate))))
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [B, n, C, K, G, V]
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], memory
