"""A part of a list that no other default test has; it finds a fault of `tests/mutants.json`."""

import jax.numpy as jnp
import numpy as np

from vlkv.sharding.ops import Part


def test_what_follows_a_list_is_not_local():
    entries, count = Part(index=1, count=2).listed(jnp.array([[1, 3, 4, 7, 1, 1]]), jnp.array([4]))
    assert int(count[0]) == 3
    np.testing.assert_array_equal(entries[0, :3], [0, 1, 3])
