"""The specification of decode_attention and core_attention: arguments, and attention over all slots with a mask."""

import dataclasses
from dataclasses import field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.quantized import Quantized, dequantize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Listed:
    """What `core_attention` takes besides; its docstring describes each argument."""

    offsets: Int[Array, "B C"]
    count: Int[Array, " B"]
    text: Int[Array, "B K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeArguments:
    """What every backend takes; the docstring of `decode_attention` describes each argument."""

    q: Float[Array, "B N H"]
    k: Float[Array, "B #K P H"] | Quantized
    v: Float[Array, "B #K P H"] | Quantized
    start: Int[Array, "B K"]
    length: Int[Array, "B K"]
    valid: Bool[Array, "B K M"] | None
    max_length: int = field(metadata={"static": True})
    return_mass: bool = field(metadata={"static": True})
    listed: Listed | None = None  # of `core_attention`

    @property
    def op(self) -> str:
        """Name of the op."""
        return "decode_attention" if self.listed is None else "core_attention"


# Attention, log of the denominator without softmax_n, and mass if it was asked for.
Attended = tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]


def decode_attention_reference(args: DecodeArguments) -> Attended:
    """Implements `decode_attention` directly from its definition."""
    max_length, repeat = args.max_length, args.q.shape[1] // args.start.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (args.q, dequantize(args.k), dequantize(args.v)))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    start, length = (jnp.repeat(x, repeat, axis=1) for x in (args.start, args.length))
    logits = jnp.einsum("bnh,bnph->bnp", q, k, precision=jax.lax.Precision.HIGHEST) / jnp.sqrt(q.shape[-1])
    place = jnp.arange(k.shape[2]) - start[..., None]  # within the segment
    inside = (place >= 0) & (place < length[..., None])
    if args.valid is not None:
        valid = jnp.repeat(args.valid, repeat, axis=1)
        inside = inside & jnp.take_along_axis(valid, jnp.clip(place, 0, max_length - 1), axis=-1)
    if args.listed is not None:
        text, exists = args.listed.text, jnp.arange(args.listed.offsets.shape[1]) < args.listed.count[:, None]
        core = jnp.any(exists[:, None, :, None] & (args.listed.offsets[:, None, :, None] == place[:, :, None]), axis=2)
        inside = inside & (core | (place >= jnp.repeat(text, repeat, axis=1)[..., None]))
    lse = jax.nn.logsumexp(jnp.where(inside, logits, -jnp.inf), axis=-1)
    p = jnp.where(inside, jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]), 0.0)
    out = jnp.einsum("bnp,bnph->bnh", p, v, precision=jax.lax.Precision.HIGHEST)
    if not args.return_mass:
        return out, lse, None
    slot = jnp.minimum(start[..., None] + jnp.arange(max_length), k.shape[2] - 1)
    mass = jnp.where(jnp.arange(max_length) < length[..., None], jnp.take_along_axis(p, slot, axis=-1), 0.0)
    return out, lse, mass
