"""core_attention: shapes that are refused, what it may not read, a quantised pool. Its numbers: test_backends.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import core_attention

BATCH, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 2, 4, 2, 8, 64


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    q = random.standard_normal((BATCH, HEADS, HEAD_DIM))
    k, v = random.standard_normal((2, BATCH, KV_HEADS, SLOTS, HEAD_DIM))
    made = {name: jnp.array(x, jnp.float32) for name, x in zip("qkv", (q, k, v), strict=True)}
    made |= {"start": jnp.array([[0, 16], [3, 0]]), "length": jnp.array([[40, 41], [20, 64]])}
    made |= {"offsets": jnp.array([[1, 5, 29, 0], [0, 9, 9, 9]]), "count": jnp.array([3, 1])}
    return made | {"text": jnp.array([[30, 30], [20, 60]])}


def test_slots_that_are_not_listed_are_not_touched(arrays):
    run = jax.jit(functools.partial(core_attention, implementation="xla"))
    clean = run(**arrays)
    asked = np.zeros((BATCH, KV_HEADS, SLOTS), bool)
    for b, h in np.ndindex(BATCH, KV_HEADS):
        start, length, text = (int(arrays[name][b, h]) for name in ("start", "length", "text"))
        asked[b, h, start + np.asarray(arrays["offsets"])[b, : int(arrays["count"][b])]] = True
        asked[b, h, start + text : start + length] = True
    poison = {name: np.where(asked[..., None], arrays[name], np.float32(np.nan)) for name in "kv"}
    for got, want in zip(run(**{**arrays, **poison}), clean, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("k", (2, 64, 3, 8)), ("text", (2, 1)), ("offsets", (1, 4)), ("count", (2, 1)), ("valid", (2, 2, 9))],
)
def test_what_does_not_fit_is_refused(arrays, name, shape):
    with pytest.raises(Exception, match="core_attention"):
        core_attention(**{**arrays, name: jnp.ones(shape, bool if name == "valid" else int)})
