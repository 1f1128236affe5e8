"""The specification of attention_mass_rows: its arguments, and the whole [T, S] matrix in float32, for tests."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention_mass.reference import RowArguments, probabilities


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MassRowsArguments(RowArguments):
    """What every backend of `attention_mass_rows` takes; the op's docstring describes each argument."""

    key_weight: Float[Array, "R S"]


def attention_mass_rows_reference(args: MassRowsArguments) -> Float[Array, "R N T"]:
    """Implements `attention_mass_rows` directly from its definition."""
    p, _ = probabilities(args)
    return jnp.einsum("rs,nts->rnt", args.key_weight, p, precision=jax.lax.Precision.HIGHEST)
