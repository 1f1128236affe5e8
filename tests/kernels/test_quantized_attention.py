"""Attention over a pool in few bits is attention over the numbers that it stands for, in every form of storage."""

from functools import partial

import jax
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import core_attention, decode_attention, dequantize, ragged
from tests.kernels import test_digits, test_quantized, test_turboquant

FORMS = ("KIVI", "TurboQuant", "digits")


def pools(form):
    """Keys, values, slots of a block, and starts and lengths of segments; digits have segments of their own."""
    shape, used = (2, 2, 112, 8), np.ones((2, 2, 112), bool)
    segments = [  # up to the last slot, and the whole pool
        ([[0, 16], [32, 48]], [[0, 1], [17, 32]]),
        ([[64, 80], [96, 0]], [[48, 32], [16, 112]]),
        ([[16, 48], [0, 80]], [[37, 63], [1, 5]]),
    ]
    if form == "digits":
        k, v = (test_digits.example(axis, seed=seed)[0] for seed, axis in enumerate(("slots", "channels"), 1))
        return k, v, 6, [(np.full((2, 2), first), [[3, 16], [0, 7]]) for first in (0, 16, 32)]
    numbers = [test_turboquant.vectors(shape, seed=seed) / 5 for seed in (1, 2)]
    if form == "TurboQuant":
        return *(test_turboquant.run(x, used, bits=3) for x in numbers), 24, segments
    axes = zip(numbers, ("slots", "channels"), strict=True)
    return *(test_quantized.run(x, used, bits=2, group=32, axis=axis) for x, axis in axes), 48, segments


@pytest.mark.default("xla")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_is_attention_over_the_dequantised_pool(monkeypatch, form, implementation):
    """In blocks that begin within a byte or a group, and that cross the end of a segment."""
    k, v, block, segments = pools(form)
    monkeypatch.setattr(ragged, "_sizes", lambda bound, entry, segments: (min(block, bound), 3))
    random, most = np.random.default_rng(4), 16 if form == "digits" else k.shape[2]
    q, valid = random.standard_normal((2, 6, 8)).astype(np.float32), random.random((2, 2, most)) < 0.7
    valid, arrays = (None if form == "digits" else valid), [np.asarray(jax.jit(dequantize)(x)) for x in (k, v)]
    options = {"return_mass": True, "max_length": most, "implementation": implementation}
    attend = jax.jit(partial(decode_attention, **options))
    for start, length in segments:
        got = attend(q, k, v, np.array(start), np.array(length), valid=valid)
        for ours, wanted in zip(got, exact.segments(q, *arrays, start, length, valid, bound=most), strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    if form != "digits":
        more = np.array([[0, 2, 5], [1, 2, 3]]), np.array([3, 2]), np.array([[30, 9], [1, 5]])
        attend = jax.jit(partial(core_attention, **options))
        segment = [np.array(x) for x in segments[2]]
        for ours, wanted in zip(attend(q, k, v, *segment, *more), attend(q, *arrays, *segment, *more), strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
