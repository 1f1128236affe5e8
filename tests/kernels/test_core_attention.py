"""core_attention: shapes that are refused, what it may not read, a quantised pool. Its numbers: test_backends.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import core_attention, decode_attention, dequantize, quantize, ragged

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


@pytest.mark.full
def test_a_list_of_everything_is_decode_attention(arrays, monkeypatch):
    monkeypatch.setattr(ragged, "_sizes", lambda bound, entry, segments: (min(16, bound), 3))
    text = jnp.full((BATCH, KV_HEADS), 20)
    everything = jnp.broadcast_to(jnp.arange(20), (BATCH, 20))
    segment = {name: arrays[name] for name in ("q", "k", "v", "start", "length")}
    got = core_attention(**segment, offsets=everything, count=jnp.full(BATCH, 20), text=text, return_mass=True)
    for g, w in zip(got, decode_attention(**segment, return_mass=True), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


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


@pytest.mark.full
def test_a_quantised_pool(arrays):
    used = jnp.ones((BATCH, KV_HEADS, SLOTS), bool)
    k = quantize(arrays["k"], used, bits=4, group=16, axis="slots")
    v = quantize(arrays["v"], used, bits=4, group=8, axis="channels")
    got = core_attention(**{**arrays, "k": k, "v": v})
    want = core_attention(**{**arrays, "k": dequantize(k), "v": dequantize(v)}, implementation="reference")
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("k", (2, 64, 3, 8)), ("text", (2, 1)), ("offsets", (1, 4)), ("count", (2, 1)), ("valid", (2, 2, 9))],
)
def test_what_does_not_fit_is_refused(arrays, name, shape):
    with pytest.raises(Exception, match="core_attention"):
        core_attention(**{**arrays, name: jnp.ones(shape, bool if name == "valid" else int)})
