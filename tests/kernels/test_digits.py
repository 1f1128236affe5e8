"""A pool of digits against numbers quantised in float64 numpy, and attention over it."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import quantize_digits
from tests.kernels.test_turboquant import vectors

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
