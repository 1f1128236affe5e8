"""A pool of digits against numbers quantised in float64 numpy, and attention over it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantize_digits
from tests.kernels.test_turboquant import values_of, vectors

LAYERS, SEGMENT, HEAD_DIM, SLOTS = 3, 16, 8, 52  # four slots belong to no segment
run = jax.jit(quantize_digits, static_argnames=("axis", "size", "slots"))


def quantized(x, inside, digits):
    """A line of numbers in 2 bits per digit, with a minimum and a step from those inside; no digits: zeros."""
    if digits == 0 or not inside.any():
        return np.zeros(len(x)), 0.0
    low, top = x[inside].min(), 4.0**digits - 1
    step = (x[inside].max() - low) / top
    return low + np.clip(np.round((x - low) / (step or 1)), 0, top) * step, step


def example(axis, dtype=jnp.float32, seed=0):
    """Keys or values of 2 rows and 2 heads: the pool, and in numpy the numbers, their quantised values and steps.

    Some slots are unused, and lines have every number of digits.
    """
    random = np.random.default_rng(seed)
    x = vectors((2, 2, LAYERS * SEGMENT, HEAD_DIM), dtype, seed).reshape(2, 2, LAYERS, SEGMENT, HEAD_DIM)
    used = np.arange(SEGMENT) < random.integers(1, SEGMENT + 1, (2, 2, LAYERS, 1))
    used[0, 0, 1] = False

    def turn(y):  # lines before their numbers, and back
        return y.swapaxes(3, 4) if axis == "slots" else y

    numbers, inside = turn(np.float64(x)), turn(np.broadcast_to(used[..., None], x.shape))
    digits = random.choice([0, 1, 2, 4, 8], numbers.shape[:4])
    digits[1, 1, 2] = 0
    value, step = np.zeros(numbers.shape), np.zeros(numbers.shape)
    for line in np.ndindex(digits.shape):
        value[line], step[line] = quantized(numbers[line], inside[line], digits[line])
    total = np.where(inside.any(axis=-1), digits, 0).sum(axis=-1)
    width = -(-used.sum(axis=-1) // 4) if axis == "slots" else HEAD_DIM // 4
    size = int((total * width).max())
    pool = run(x, used, digits.astype(np.uint8), axis=axis, size=size, slots=SLOTS)
    return pool, used.reshape(2, 2, -1), *(turn(y).reshape(2, 2, -1, HEAD_DIM) for y in (numbers, value, step))


@pytest.mark.default("float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("axis", ["slots", "channels"])
def test_every_line_has_its_own_bits(axis, dtype):
    """And no more bytes than the most digits of a segment need."""
    pool, used, x, value, step = example(axis, dtype)
    got = np.float64(values_of(pool))
    assert pool.shape == got.shape == (2, 2, SLOTS, HEAD_DIM) and pool.dtype == dtype
    assert (got[:, :, LAYERS * SEGMENT :] == 0).all()
    lines = 2 * 2 * LAYERS * (HEAD_DIM if axis == "slots" else SEGMENT)
    assert pool.nbytes == pool.codes.size + lines * (1 + 2 * jnp.dtype(dtype).itemsize)
    got, x, value, step = (y[:, :, : LAYERS * SEGMENT][used] for y in (got[:, :, : LAYERS * SEGMENT], x, value, step))
    assert (got[step == 0] == value[step == 0]).all()
    last_bit = float(jnp.finfo(dtype).eps) * np.abs(x).max()
    assert (np.abs(got - x) <= np.where(step > 0, 0.51 * step + last_bit, np.inf)).all()
    if dtype == jnp.float32:
        assert np.mean(np.abs(got - value) < 1e-4) > 0.99  # a number between two steps may get either
