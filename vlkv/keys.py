"""Random keys, as the public functions accept them."""

import jax
from jaxtyping import Array, Key

from vlkv.errors import InputError

_REMEDY = "pass key=jax.random.key(seed)"


def single_key(key: object) -> Key[Array, ""] | None:
    """The key as one of `jax.random.key`; None stays None.

    Args:
        key: from `jax.random.key` or `jax.random.PRNGKey`, which give the same random numbers; it may be traced.

    Raises:
        InputError: an array of several keys, or no key.
    """
    if key is None:
        return None
    if not isinstance(key, jax.Array):
        what = repr(key) if isinstance(key, int | float | str) else f"of type {type(key).__name__}"
        raise InputError(f"key {what[:60]} is not a random key: {_REMEDY}")
    wrong = InputError(f"key of {key.dtype} {list(key.shape)} is not a random key: {_REMEDY}")
    typed, raw = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key), key.dtype == "uint32"
    if not (typed or raw):
        raise wrong
    if key.ndim != raw:
        raise InputError(
            f"key has shape {list(key.shape)}: pass one key, key=jax.random.key(seed), for the whole batch"
        )
    try:
        return key if typed else jax.random.wrap_key_data(key)
    except (TypeError, ValueError):
        raise wrong from None


def required_key(key: object) -> Key[Array, ""]:
    """`single_key` for functions that always draw; raises InputError for None too."""
    single = single_key(key)
    if single is None:
        raise InputError(f"no key is given: {_REMEDY}")
    return single
