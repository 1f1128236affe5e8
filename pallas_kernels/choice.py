"""Which implementation of each op to run: one value to hand down where several ops are used."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Names as the ops' `implementation=` takes them; None: what suits the platform. Static under jit: no leaves."""

    decode_attention: str | None = None
    core_attention: str | None = None
    attention_mass: str | None = None
    attention_mass_rows: str | None = None
    prefill_attention: str | None = None
