"""Cases of generation that no other default test has; each finds a fault of `tests/mutants.json`."""

import jax
import numpy as np

import vlkv


def test_a_vocabulary_smaller_than_top_k_is_drawn_from_as_a_whole():
    logits = jax.numpy.array([[0.0, -1.0, 50.0]])
    drawn = jax.jit(vlkv.Sample(top_k=50).choose)(logits, jax.random.key(0))
    np.testing.assert_array_equal(drawn, [2])
