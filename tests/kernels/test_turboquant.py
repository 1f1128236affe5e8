"""TurboQuant's pool against its definition in float64 numpy and against published distortions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dequantize, quantize_rotated
from pallas_kernels.quantized import codebook, rotate

# Max 1960, "Quantizing for Minimum Distortion", Table I: the positive levels.
LEVELS = {
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}
# Mean squared error of unit vectors: 0.117, 0.03, 0.009 (the paper, Sec. 1), with more digits from Max.
ERRORS = {2: 0.1175, 3: 0.03454, 4: 0.009497}
run = jax.jit(quantize_rotated, static_argnames="bits")
values_of = jax.jit(dequantize)
turn_of = jax.jit(lambda head_dim: rotate(jnp.eye(head_dim)), static_argnums=0)


def turboquant(x, bits):
    """Alg. 1 for vectors [..., H]: nearest levels of the rotated unit vector's channels, rotated back."""
    head_dim = x.shape[-1]
    levels = np.array([-level for level in LEVELS[bits][::-1]] + LEVELS[bits])
    turn = np.float64(turn_of(head_dim))
    norm = np.linalg.norm(np.float64(x), axis=-1, keepdims=True)
    rotated = np.float64(x) / norm @ turn * np.sqrt(head_dim)
    nearest = np.abs(rotated[..., None] - levels).argmin(axis=-1)
    return nearest, levels[nearest] / np.sqrt(head_dim) * norm @ turn.T


def vectors(shape, dtype=jnp.float32, seed=0):
    """Channels of very different sizes and means, as keys have."""
    random = np.random.default_rng(seed)
    channels = shape[1], 1, shape[3]
    x = random.standard_normal(shape) * random.uniform(0.1, 5, channels) + 10 * random.standard_normal(channels)
    return x.astype(dtype)


@pytest.mark.parametrize("bits", LEVELS)
def test_the_codebook_is_the_published_one(bits):
    levels = np.array(codebook(bits))
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-12)
    np.testing.assert_allclose(levels[2 ** (bits - 1) :], LEVELS[bits], rtol=5e-4)


def test_the_rotation_is_one():
    turn = np.float64(turn_of(24))
    np.testing.assert_allclose(turn @ turn.T, np.eye(24), atol=1e-6)


@pytest.mark.default("3")
@pytest.mark.parametrize("bits", LEVELS)
def test_distortion_is_that_of_the_paper_whatever_the_vectors_are(bits):
    """Dense vectors, and vectors with only one channel, which no codebook serves without a rotation."""
    dense = np.random.default_rng(0).standard_normal((128, 128))
    x = np.stack([dense, 7 * np.eye(128)])[None].astype(np.float32)
    pool = run(x, np.ones(x.shape[:3], bool), bits=bits)
    assert pool.codes.shape == (1, 2, 128, 16 * bits) and pool.shape == x.shape
    assert pool.nbytes == 2 * 128 * (16 * bits + 4)
    x, got = np.float64(x[0]), np.float64(values_of(pool))[0]
    error = (((got - x) ** 2).sum(axis=-1) / (x**2).sum(axis=-1)).mean(axis=-1)
    np.testing.assert_allclose(error, ERRORS[bits], rtol=0.05)


@pytest.mark.default("3-float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bits", LEVELS)
def test_as_the_paper_defines_it(bits, dtype):
    x = vectors((2, 3, 20, 24), dtype)
    inside = np.ones(x.shape[:3], bool)
    inside[:, :, 7] = False
    pool = run(np.where(inside[..., None], x, np.nan).astype(dtype), inside, bits=bits)
    codes, value = turboquant(x, bits)
    word = (np.float64(pool.codes).reshape(2, 3, 20, -1, bits) * 256.0 ** np.arange(bits)).sum(axis=-1)  # of 8 codes
    packed = (codes.reshape(2, 3, 20, -1, 8) * (2.0**bits) ** np.arange(8)).sum(axis=-1)
    assert (word == packed)[inside].mean() > 0.99  # a channel between two levels may get either
    got = np.float64(values_of(pool))
    off = np.abs(got - value)[inside]
    scale = np.linalg.norm(np.float64(x), axis=-1)[inside][:, None]
    assert np.mean(off <= (1e-3 if dtype == jnp.float32 else 0.02) * scale) > 0.99
    assert (got[~inside] == 0).all()


@pytest.mark.parametrize(("bits", "head_dim"), [(8, 8), (3, 12)])
def test_what_cannot_be_packed_is_refused(bits, head_dim):
    with pytest.raises(ValueError, match=f"bits={bits} must be 2, 3 or 4, and {head_dim} channels"):
        quantize_rotated(np.ones((1, 1, 4, head_dim), np.float32), np.ones((1, 1, 4), bool), bits=bits)
