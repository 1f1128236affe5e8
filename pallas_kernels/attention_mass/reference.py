"""The specification of both masses: their arguments, and the whole [T, S] matrix in float32, for tests."""

import dataclasses
from dataclasses import field
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Statistic = Literal["sum", "square", "entropy", "count"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowArguments:
    """What `attention_mass` and `attention_mass_rows` have in common; their docstrings describe each argument."""

    q: Float[Array, "N T H"]
    k: Float[Array, "K S H"]
    key_mask: Bool[Array, " S"]
    row_place: Int[Array, " T"]
    causal: bool = field(metadata={"static": True})
    in_order: bool = field(metadata={"static": True})  # row t has index t, so early rows need only a prefix of the keys
    softmax_n: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MassArguments(RowArguments):
    """What every backend of `attention_mass` takes; the op's docstring describes each argument."""

    row_weight: Float[Array, "R T"]
    statistic: str = field(metadata={"static": True})
    threshold: float = field(metadata={"static": True})
    lse: Float[Array, "N T"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MassRowsArguments(RowArguments):
    """What every backend of `attention_mass_rows` takes; the op's docstring describes each argument."""

    key_weight: Float[Array, "R S"]


def attention_mass_reference(args: MassArguments) -> Float[Array, "R N S"]:
    """Implements `attention_mass` directly from its definition."""
    p = statistic_of(*probabilities(args), args.statistic, args.threshold)
    return jnp.einsum("rt,nts->rns", args.row_weight, p, precision=jax.lax.Precision.HIGHEST)


def statistic_of(p: Array, allowed: Array, statistic: str, threshold: float) -> Array:
    """What is summed over the rows, of the probabilities [.., T, S] of the allowed keys."""
    if statistic == "square":
        return p**2
    if statistic == "entropy":
        return -p * jnp.log(jnp.where(p > 0, p, 1.0))
    if statistic == "count":
        return (allowed & (p >= threshold * jnp.max(p, axis=-1, keepdims=True))).astype(jnp.float32)
    return p


def attention_mass_rows_reference(args: MassRowsArguments) -> Float[Array, "R N T"]:
    """Implements `attention_mass_rows` directly from its definition."""
    p, _ = probabilities(args)
    return jnp.einsum("rs,nts->rnt", args.key_weight, p, precision=jax.lax.Precision.HIGHEST)


def probabilities(args: RowArguments) -> tuple[Float[Array, "N T S"], Bool[Array, "#T S"]]:
    """The probabilities of all rows, and which keys each row may attend to."""
    q, softmax_n = args.q.astype(jnp.float32), args.softmax_n
    k = jnp.repeat(args.k.astype(jnp.float32), q.shape[0] // args.k.shape[0], axis=0)
    logits = jnp.einsum("nth,nsh->nts", q, k, precision=jax.lax.Precision.HIGHEST) / jnp.sqrt(q.shape[-1])
    before = jnp.arange(k.shape[1]) <= args.row_place[:, None]
    allowed = args.key_mask & before if args.causal else args.key_mask[None]
    peak = jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1, keepdims=True)
    peak = jnp.maximum(peak, 0.0) if softmax_n else jnp.where(jnp.isfinite(peak), peak, 0.0)
    exponent = jnp.where(allowed, jnp.exp(logits - peak), 0.0)
    total = softmax_n * jnp.exp(-peak) + jnp.sum(exponent, axis=-1, keepdims=True)
    return exponent / jnp.where(total > 0, total, 1.0), allowed
