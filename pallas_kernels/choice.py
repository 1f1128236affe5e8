"""The choice of an implementation for each op, as one value that is passed through functions that use several ops."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Implementation of each op, by name; None chooses one for the platform. It has no leaves: static under jit."""

    decode_attention: str | None = None
    core_attention: str | None = None
    attention_mass: str | None = None
    attention_mass_rows: str | None = None
    prefill_attention: str | None = None
    write_slots: str | None = None
    swap_slots: str | None = None
