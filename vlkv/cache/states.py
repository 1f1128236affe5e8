"""The cache of layers with a recurrence: a state of constant size, whatever the policy and the prompt are.

Policies neither score nor shorten it. It contains all tokens that the layer has processed.

Axes: B batch · N value heads · H channels of a key · V channels of a value · R tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax
from jaxtyping import Array, Float

from vlkv.sharding.placement import axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The state of one layer; see `vlkv.decoder.recurrence`."""

    memory: Float[Array, "B N H V"] = field(metadata=axes("batch", "heads", "state"))  # in float32
    # Of queries, keys and values: the R newest inputs of the convolution, zero before the first token.
    newest: tuple[Float[Array, "B R _K H"], Float[Array, "B R _K H"], Float[Array, "B R N V"]] = field(
        metadata=axes("batch", "state", "heads")
    )
