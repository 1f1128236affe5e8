"""Cases of the ops that no other default test has; each finds a fault of `tests/mutants.json`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import prefill_attention, write_slots


def test_reference_of_entropy():
    """One query head; all keys are equal, so that token t has entropy log(t + 1), equally from each of its keys."""
    q = k = v = jnp.ones((1, 5, 1, 2))
    got = jax.jit(partial(prefill_attention, implementation="reference", statistics=(("entropy", 0.0),)))(
        q, k, v, row_weight=jnp.ones((1, 1, 5))
    )
    each = np.log(np.arange(1, 6)) / np.arange(1, 6)
    np.testing.assert_allclose(got.mass[0, 0, 0], np.cumsum(each[::-1])[::-1], rtol=1e-5)


def test_slots_past_the_end_are_not_written():
    x = jnp.zeros((1, 2, 128, 8))
    write = jax.jit(partial(write_slots, implementation="mosaic_tpu:interpret"))
    got = write(x, jnp.ones((1, 2, 8)), jnp.array([[128, 3]]))
    np.testing.assert_array_equal(got, np.zeros(x.shape) + (np.arange(256).reshape(1, 2, 128, 1) == 128 + 3))
