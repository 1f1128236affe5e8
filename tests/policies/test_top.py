"""`observe.top` against numpy's stable sort, with ties, both zeros, infinities and what is no number."""

import jax
import jax.numpy as jnp
import numpy as np

from vlkv.masks import top

HEADS, LENGTH, DRAWS = 4, 37, 60
NASTY = np.array([-np.inf, -1e30, -3.0, -0.0, 0.0, 1e-30, 2.0, 5.5, 5.5, np.inf, np.nan], np.float32)


def best(x, candidates, count):
    """One head: candidates by falling value, then by place."""
    places = sorted(np.flatnonzero(candidates), key=lambda i: (-x[i], i))
    return np.isin(np.arange(len(x)), places[: max(count, 0)])


def test_the_best_of_each_head():
    rng, run = np.random.default_rng(0), jax.jit(top)
    for draw in range(DRAWS):
        x = rng.choice(NASTY, (HEADS, LENGTH)) if draw % 2 else rng.normal(size=(HEADS, LENGTH)).astype(np.float32)
        candidates = rng.random((HEADS, LENGTH)) < rng.choice([0.0, 0.1, 0.6, 1.0])
        count = rng.integers(-1, LENGTH + 5, HEADS)
        numbers = np.where(np.isnan(x), -np.inf, x)
        expected = [best(*head) for head in zip(numbers, candidates, count, strict=True)]
        np.testing.assert_array_equal(run(jnp.asarray(x), jnp.asarray(candidates), jnp.asarray(count)), expected)
