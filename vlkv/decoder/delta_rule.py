"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", Eq. 10), in float32.

Each value head has a memory M [H, V], which is read with queries and written with keys. For each token,

    M = exp(g) M + k (b (v - exp(g) M^T k))^T        o = M^T q

where g <= 0 is the logarithm of the decay, and b is the share of the old value of k that the new one replaces. A token
with g = b = 0 changes nothing. Prompts are processed in chunks: within one, the written values follow from a triangular
system, so that all work is products of matrices (the paper's Sec. 3.3); between chunks, the memory is carried.

Axes: B batch · T tokens · K key heads · G value heads that share a key head · N = K G · H channels of a key ·
V channels of a value · C tokens of a chunk · n chunks.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.lax.linalg import triangular_solve
from jaxtyping import Array, Float

from pallas_kernels.dispatch import target_platform

CHUNK = 64  # the most tokens of a chunk; a power of two, for `_from_halves`
# Otherwise a TPU rounds the factors to bfloat16 and a GPU to TF32, and errors in the memory stay.
_einsum = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)

Keys = Float[Array, "B T K H"]  # and queries
Values = Float[Array, "B T K G V"]
Rates = Float[Array, "B T K G"]
Memory = Float[Array, "B K G H V"]


def delta_rule(
    q: Keys,
    k: Keys,
    v: Float[Array, "B T N V"],
    decay: Float[Array, "B T N"],
    rate: Float[Array, "B T N"],
    memory: Float[Array, "B N H V"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]:
    """What each token reads, after it has written; and the memory after the last one.

    Keys have length 1 or less. `decay` is g, `rate` is b, from 0 to 1, and `memory` that before the first token.
    """
    (batch, length, groups, _), heads = k.shape, v.shape[2]
    q, k, v, decay, rate, memory = (x.astype(jnp.float32) for x in (q, k, v, decay, rate, memory))
    v, decay, rate = (x.reshape(batch, length, groups, heads // groups, *x.shape[3:]) for x in (v, decay, rate))
    memory = memory.reshape(batch, groups, heads // groups, *memory.shape[2:])
    run = _step if length == 1 else _in_chunks
    out, memory = run(q, k, v, decay, rate, memory)
    return out.reshape(batch, length, heads, -1), memory.reshape(batch, heads, *memory.shape[3:])


def _step(q: Keys, k: Keys, v: Values, decay: Rates, rate: Rates, memory: Memory) -> tuple[Values, Memory]:
    """One token. Its query and its key read the old memory together, which is then written once."""
    kept = jnp.exp(decay[:, 0])[..., None]
    old = _einsum("btkh,bkghv->tbkgv", jnp.concatenate([k, q], axis=1), memory) * kept
    new = rate[:, 0, ..., None] * (v[:, 0] - old[0])
    out = old[1] + jnp.sum(q * k, axis=-1)[:, 0, :, None, None] * new
    return out[:, None], memory * kept[..., None] + k[:, 0, :, None, :, None] * new[..., None, :]


def _in_chunks(q: Keys, k: Keys, v: Values, decay: Rates, rate: Rates, memory: Memory) -> tuple[Values, Memory]:
    """Many tokens."""
    length = q.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())

    def cut(x: Float[Array, "B T ..."]) -> Float[Array, "n B C ..."]:
        x = jnp.pad(x, [(0, 0), (0, -length % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 0, 1)

    q, k, v, decay, rate = map(cut, (q, k, v, decay, rate))
    decay, rate, v = jnp.moveaxis(decay, 2, -1), jnp.moveaxis(rate, 2, -1), jnp.moveaxis(v, 2, -2)
    until, later = jnp.tri(size, dtype=jnp.float32), jnp.tri(size, k=-1, dtype=bool)
    # Sums of the decays from a chunk's start to each token, and from each token d to each later token c. The latter are
    # not made as differences of the former, which after fast decay are large and therefore imprecise.
    total = _einsum("ce,nbkge->nbkgc", until, decay)
    between = _einsum("ce,nbkged->nbkgcd", until, jnp.where(later, decay[..., :, None], 0.0))
    between = until * jnp.exp(until * between)  # [n, B, K, G, C, C]
    left = between[..., -1, :, None]  # of what each token writes, at the end of its chunk
    alike, read = (_einsum("nbckh,nbdkh->nbkcd", x, k)[:, :, :, None] * between for x in (k, q))
    # Written values solve (1 + lower) new = rate (v - what the old memory has for k).
    solve = _inverse(jnp.where(later, rate[..., None] * alike, 0.0))

    def chunk(memory: Memory, x: tuple[Array, ...]) -> tuple[Array, Float[Array, "B K G C V"]]:
        q, k, v, rate, total, left, read, solve = x
        kept = jnp.exp(total)[..., None]
        old = _einsum("bckh,bkghv->bkgcv", k, memory) * kept
        new = _einsum("bkgcd,bkgdv->bkgcv", solve, rate[..., None] * (v - old))
        out = _einsum("bckh,bkghv->bkgcv", q, memory) * kept + _einsum("bkgcd,bkgdv->bkgcv", read, new)
        return memory * kept[..., -1:, :] + _einsum("bckh,bkgcv->bkghv", k, left * new), out

    memory, out = jax.lax.scan(chunk, memory, (q, k, v, rate, total, left, read, solve))
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [B, n, C, K, G, V]
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], memory


def _inverse(lower: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """The inverse of 1 + `lower`, which is zero on and above the diagonal. C is a power of two.

    A TPU's compiler takes half a minute for `_from_halves`. XLA's solver calls LAPACK on a CPU, one system after the
    other, and such a program for several devices on a CPU may never return.
    """
    if target_platform() == "cpu":
        return _from_halves(lower)
    identity = jnp.broadcast_to(jnp.eye(lower.shape[-1]), lower.shape)
    return triangular_solve(lower, identity, left_side=True, lower=True, unit_diagonal=True)


def _from_halves(lower: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """`_inverse`, made of the inverses of both halves, as exactly as by substitution, and in products alone."""
    half = lower.shape[-1] // 2
    if half == 0:
        return jnp.ones_like(lower)
    first, second = _from_halves(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    below = -_einsum("...ij,...jk,...kl->...il", second, lower[..., half:, :half], first)
    return jnp.concatenate(
        [jnp.concatenate([first, jnp.zeros_like(first)], -1), jnp.concatenate([below, second], -1)], -2
    )
