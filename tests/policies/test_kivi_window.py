"""KIVI's window of generated tokens against Alg. 1 of the paper, written as a loop over tokens in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import models, programs
from tests.generation.test_extend import turn
from vlkv import policies
from vlkv.cache.pool import Storage
from vlkv.cache.writing import quantize_old

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
def test_decoding_sees_the_window():
    """A window that nothing leaves changes nothing; a small one changes the logits from its first full group on."""
    params, inputs = models.tiny_llava(config=models.SMALL), models.unequal_batch(models.SMALL)
    step = programs.decode_step

    def logits(window, updater=None):
        policy = policies.KIVI(bits=2, group=GROUP, window=window)
        policy = policy if updater is None else policies.compose(updater, store=policy)
        cache, _ = programs.prefill(params, inputs, policy, new_tokens=8)
        found = []
        for token in (7, 8, 9, 10, 11):
            cache, made = step(params, cache, jnp.full(inputs.tokens.shape[0], token))
            found.append(made)
        return np.stack(found)

    plain = logits(None)
    np.testing.assert_array_equal(logits(8), plain)
    small = logits(WINDOW)
    np.testing.assert_array_equal(small[: WINDOW - 1], plain[: WINDOW - 1])
    assert (np.abs(small[WINDOW - 1 :] - plain[WINDOW - 1 :]).max(axis=-1) > 1e-4).all()
    # A method that looks at the cache in every step, and here evicts nothing, sees the same.
    np.testing.assert_allclose(logits(WINDOW, policies.PrefixKV(keep=1.0, scope="all")), small, atol=1e-4)


@pytest.mark.full
def test_a_turn_sees_the_window_token_by_token():
    """`extend` with tokens of three rows, padded on the left, against `decode_step`."""
    params, inputs = models.tiny_llava(config=models.SMALL), models.unequal_batch(models.SMALL)
    policy = policies.KIVI(bits=2, group=GROUP, window=WINDOW)
    cache, _ = programs.prefill(params, inputs, policy, new_tokens=16)
    rng = np.random.default_rng(0)
    said = [rng.integers(6, 50, count).tolist() for count in (11, 6, 3)]
    _, logits = programs.extend(params, cache, turn(said, seed=0, padding="left"))
    step = programs.decode_step
    for i, tokens in enumerate(np.stack([np.pad(row, (0, 11 - len(row))) for row in said], axis=1)):
        cache, theirs = step(params, cache, tokens)
        for row in (row for row in range(3) if len(said[row]) == i + 1):
            np.testing.assert_allclose(logits[row], theirs[row], atol=1e-4)
