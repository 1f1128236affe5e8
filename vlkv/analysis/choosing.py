"""Which entries a policy would keep of a prefilled prompt, with its scores and statistics.

Axes: B batch · L layers · K key heads · T prompt.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from vlkv.compression.candidates import select
from vlkv.compression.checking import require_fit
from vlkv.compression.policy import Policy
from vlkv.compression.selection import Selection
from vlkv.compression.slots import slots_of
from vlkv.errors import InputError
from vlkv.generation.prompt import Prompt
from vlkv.keys import single_key


def choose(prompt: Prompt, policy: Policy, *, key: PRNGKeyArray | None = None) -> Selection:
    """`policies.select` for every row of a prompt: kept entries, budgets, scores, and the method's own `extra` arrays.

    In `extra`, AirCache returns strength and skewness (Eqs. 9, 10; Fig. 3), PrefixKV the cumulative priority, and CSP
    the self and cross scores.

    Raises:
        InputError: the policy reduces the prompt, so that layers have different tokens; or a key is missing.
    """
    if prompt.reducer is not None or slots_of(policy).reduce is not None:
        name = type(prompt.reducer or slots_of(policy).reduce).__name__
        raise InputError(f"{name} shortens the prompt and ranks no entries: see analysis.reached")
    key = single_key(key)
    require_fit(policy, len(prompt.layers), key)
    keys = None if key is None else jax.random.split(key, prompt.valid.shape[0])
    q, k, v = (jnp.stack([getattr(layer, name) for layer in prompt.layers], axis=1) for name in "qkv")
    context = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *(layer.context for layer in prompt.layers))
    same, of_row = prompt.layers[0], partial(select, policy)  # grid and until are the same in all layers
    return jax.vmap(of_row)(q, k, v, prompt.is_vision, prompt.valid, keys, same.grid, context, same.until)
