"""A tail that is quantised as it is written (TurboQuant)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from pallas_kernels import QuantizedPool, dequantize, quantize_rotated
from tests import models, programs
from tests.generation.test_extend import turn
from vlkv import policies
from vlkv.cache.resizing import resize

POLICY = policies.compose(policies.SnapKV(keep=0.4, window=2), store=policies.TurboQuant(bits=3, tail=True))
SAID = [np.random.default_rng(row).integers(6, 50, count).tolist() for row, count in enumerate((7, 6, 3))]
prefill, extend = programs.prefill, programs.extend
step = programs.decode_step


@pytest.mark.full
def test_generated_tokens_are_stored_in_few_bits(tmp_path):
    params, inputs = models.tiny_llava(config=models.SMALL), models.unequal_batch(models.SMALL)
    cache, _ = prefill(params, inputs, POLICY, new_tokens=16)
    plain, _ = prefill(params, inputs, policies.compose(POLICY, store=policies.TurboQuant(bits=3)), new_tokens=16)
    assert isinstance(cache.tail_k[0], QuantizedPool) and isinstance(plain.tail_k[0], jax.Array)
    assert cache.slots == plain.slots and cache.bytes < plain.bytes

    # Saved, loaded and given more slots on the way, token by token, and in one turn.
    after, logits = extend(params, cache, turn(SAID, seed=0, padding="left"))
    vlkv.save_cache(tmp_path / "cache", params, cache)
    cache = resize(vlkv.load_cache(tmp_path / "cache", params), 24)
    for i, tokens in enumerate(np.stack([np.pad(row, (0, 7 - len(row))) for row in SAID], axis=1)):
        cache, theirs = step(params, cache, tokens)
        plain, _ = step(params, plain, tokens)
        for row in (row for row in range(3) if len(SAID[row]) == i + 1):
            np.testing.assert_allclose(logits[row], theirs[row], atol=1e-4)

    # Keys and values of the first layer do not depend on the tail.
    for ours, full, turned in ((cache.tail_k, plain.tail_k, after.tail_k), (cache.tail_v, plain.tail_v, after.tail_v)):
        want = dequantize(quantize_rotated(full[0][:1, :, :7], jnp.ones((1, full[0].shape[1], 7), bool), bits=3))
        np.testing.assert_allclose(dequantize(ours[0])[:1, :, :7], want, atol=1e-6)
        np.testing.assert_allclose(dequantize(turned[0])[:1, :, :7], want, atol=1e-5)
