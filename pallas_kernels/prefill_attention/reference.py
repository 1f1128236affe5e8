"""The specification of prefill_attention: its arguments, and attention over all pairs of tokens with a mask."""

import dataclasses
from dataclasses import field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_mass.reference import Statistic, statistic_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillArguments:
    """What every backend of `prefill_attention` takes; the op's docstring describes each argument."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    valid: Bool[Array, "B T"] | None
    causal: bool = field(metadata={"static": True})
    return_lse: bool = field(metadata={"static": True})
    place: Int[Array, "B T"] | None = None
    window: int | None = field(default=None, metadata={"static": True})
    until: Int[Array, "B T"] | None = None
    ahead: int = field(default=0, metadata={"static": True})
    row_weight: Float[Array, "B R T"] | None = None
    statistics: tuple[tuple[Statistic, float], ...] = field(default=(), metadata={"static": True})  # R of them


class Attended(NamedTuple):
    """Attention and what else was asked for."""

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B N T"] | None = None  # log of each query's denominator
    mass: Float[Array, "B R N T"] | None = None  # what each key receives


def prefill_attention_reference(args: PrefillArguments) -> Attended:
    """Implements `prefill_attention` directly from its definition."""
    q, k, v = args.q, args.k, args.v
    length, repeat = q.shape[1], q.shape[2] // k.shape[2]
    wide = [x.astype(jnp.float32) for x in (q, jnp.repeat(k, repeat, axis=2), jnp.repeat(v, repeat, axis=2))]
    logits = jnp.einsum("btnh,bsnh->bnts", *wide[:2], precision=jax.lax.Precision.HIGHEST) * q.shape[-1] ** -0.5
    allowed = jnp.tril(jnp.ones((length, length), bool)) if args.causal else jnp.ones((length, length), bool)
    if args.until is not None:
        allowed = jnp.arange(length) <= args.until[:, None, :, None]
    if args.window is not None:
        place = jnp.arange(length)[None] if args.place is None else args.place
        allowed = allowed & (place[:, None, :, None] - place[:, None, None] < args.window)
    if args.valid is not None:
        allowed = allowed & args.valid[:, None, None]
    logits = jnp.where(allowed, logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", weights, wide[2], precision=jax.lax.Precision.HIGHEST).astype(q.dtype)
    lse = jax.nn.logsumexp(logits, axis=-1) if args.return_lse else None
    if args.row_weight is None:
        return Attended(out, lse)
    summed = jnp.stack([statistic_of(weights, allowed, *statistic) for statistic in args.statistics], axis=1)
    mass = jnp.einsum("brt,brnts->brns", args.row_weight, summed, precision=jax.lax.Precision.HIGHEST)
    return Attended(out, lse, mass)
