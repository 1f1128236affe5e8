"""What a policy would keep of a prefilled prompt, with its scores and statistics.

Axes: B batch · L layers · K key heads · T prompt.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from vlkv.errors import InputError
from vlkv.policies.policy import Policy
from vlkv.policies.selection import Selection, require_fit, select
from vlkv.reading import Prompt


def choose(prompt: Prompt, policy: Policy, *, key: Key[Array, ""] | None = None) -> Selection:
    """`policies.select` for every row of a whole prompt: budgets, scores, and what the method keeps in `extra`.

    `extra` of AirCache holds strength and skewness (Eqs. 9, 10; Fig. 3), of PrefixKV the cumulative priority, of CSP
    the self and the cross scores.

    Raises:
        InputError: the prompt was reduced, so that its layers hold different tokens; or a key is missing.
    """
    if prompt.reducer is not None or policy.reducer is not None:
        name = type(prompt.reducer or policy.reducer).__name__
        raise InputError(f"{name} shortens the prompt and ranks nothing afterwards: look at its survival instead")
    require_fit(policy, len(prompt.layers), key)
    keys = None if key is None else jax.random.split(key, prompt.valid.shape[0])
    q, k, v = (jnp.stack([jnp.swapaxes(getattr(r, name), 1, 2) for r in prompt.layers], axis=1) for name in "qkv")

    def row(*args: Any) -> Selection:
        return select(policy, *args)

    return jax.vmap(row)(q, k, v, prompt.is_vision, prompt.valid, keys)
