"""Tokens of the answer in few bits: KIVI's window against Alg. 1 of the paper in float64, and TurboQuant's tail."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from pallas_kernels import QuantizedPool, dequantize, quantize_rotated
from tests import programs
from vlkv import policies
from vlkv.cache.pool import Storage
from vlkv.cache.resizing import resize
from vlkv.cache.writing import of_layer, quantize_old

BITS, GROUP, WINDOW = 2, 4, 4


def quantised(x, axis):
    """Every group along an axis to 2^bits values between its smallest and largest."""
    x = np.moveaxis(x, axis, -1)
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    low, step = groups.min(-1, keepdims=True), np.ptp(groups, axis=-1, keepdims=True) / (2**BITS - 1)
    return np.moveaxis((low + np.round((groups - low) / step) * step).reshape(x.shape), -1, axis)


def test_tokens_that_leave_the_window_are_quantised():
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 11, 2, 4))
    see = jax.jit(partial(quantize_old, bits=BITS, group=GROUP, window=WINDOW))
    tail = tuple(jnp.asarray(x.swapaxes(0, 1), jnp.float32)[None] for x in (keys, values))
    stored_k, recent_k = np.zeros((0, 2, 4)), np.zeros((0, 2, 4))
    stored_v, recent_v = stored_k, recent_k
    for n in range(1, 12):
        recent_k = np.concatenate([recent_k, keys[n - 1 : n]])
        if len(recent_k) == WINDOW:  # all of them leave together, in groups along the tokens
            stored_k, recent_k = np.concatenate([stored_k, quantised(recent_k, 0)]), recent_k[:0]
        recent_v = np.concatenate([recent_v, values[n - 1 : n]])
        if len(recent_v) > WINDOW:  # the oldest leaves, in groups along the channels
            stored_v, recent_v = np.concatenate([stored_v, quantised(recent_v[:1], 2)]), recent_v[1:]
        k, v = (np.swapaxes(x[0], 0, 1) for x in see(tail, jnp.array([n])))
        np.testing.assert_allclose(k[:n], np.concatenate([stored_k, recent_k]), atol=1e-6)
        np.testing.assert_allclose(v[:n], np.concatenate([stored_v, recent_v]), atol=1e-6)


def test_the_window_is_of_the_storage():
    assert policies.KIVI(window=128).storage == Storage(2, 32, window=128)


@pytest.mark.full
def test_generated_tokens_are_stored_in_few_bits(params, read, tmp_path):
    """Saved, loaded and given more slots on the way. Keys and values of the first layer do not depend on the tail."""
    snap, tokens = policies.SnapKV(keep=0.4, window=2), np.random.default_rng(0).integers(6, 50, (7, 3))
    stores = (policies.TurboQuant(bits=3, tail=True), policies.TurboQuant(bits=3))
    cache, plain = (programs.fill_cache(read, policies.compose(snap, store=x), new_tokens=16) for x in stores)
    assert isinstance(cache.tail_k, QuantizedPool) and isinstance(plain.tail_k, jax.Array)
    assert cache.slots == plain.slots and cache.bytes < plain.bytes
    vlkv.save_cache(tmp_path / "cache", params, cache)
    cache = resize(vlkv.load_cache(tmp_path / "cache", params), 24)
    for now in tokens:
        cache, plain = (programs.decode_step(params, x, now)[0] for x in (cache, plain))
    for ours, full in ((cache.tail_k, plain.tail_k), (cache.tail_v, plain.tail_v)):
        new = full[:, :, 0, :7]
        want = dequantize(quantize_rotated(new, jnp.ones(new.shape[:3], bool), bits=3))
        np.testing.assert_allclose(dequantize(of_layer(ours, 0))[:, :, :7], want, atol=1e-5)
