"""A case of the analysis that no other default test has; it finds a fault of `tests/mutants.json`."""

import numpy as np

import vlkv
from vlkv import policies


def test_the_full_cache_does_not_differ_from_itself_in_any_row(params, batch):
    sampling = vlkv.Greedy(max_new_tokens=2, stop=())
    np.testing.assert_array_equal(vlkv.kl_to_full(params, batch, policies.Full(), sampling=sampling), np.zeros(3))
