"""The low-pass filter against scipy's cosine transform in float64."""

import jax
import numpy as np
import pytest
from scipy.fft import dct, idct

from vlkv.compression.frequencies import low_pass

run = jax.jit(low_pass, static_argnames="frequencies")


@pytest.mark.parametrize(("rows", "count", "highest"), [(40, 37, 36), (40, 40, 7)])
def test_low_pass(rows, count, highest):
    x = np.random.default_rng(0).normal(size=(2, rows, 3)).astype(np.float32)
    mask = np.arange(rows) >= rows - count  # padding at the left
    spectrum = dct(np.float64(x[:, mask]), axis=1, norm="ortho")
    spectrum[:, highest + 1 :] = 0
    want = np.zeros(x.shape)
    want[:, mask] = idct(spectrum, axis=1, norm="ortho")
    found = run(x, mask, highest, frequencies=highest + 2)
    np.testing.assert_allclose(found, want, atol=1e-5)
