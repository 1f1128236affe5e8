"""Helpers of the tests on golden vectors: run a policy on the arrays of a file of any shapes."""

import jax
import numpy as np

from tests.policies.arrays import by_parts
from vlkv import policies

select, compress = by_parts()(policies.select), by_parts()(policies.compress)
allocate = jax.jit(
    lambda policy, statistics, total, most: policy.allocate(statistics, total=total, most=most, layers=len(most))
)


def layered(g, *names):
    """Arrays with a leading axis L, which is added if the file has only one layer."""
    return tuple(g[name] if g[name].ndim == 4 else g[name][None] for name in names)


def choose(policy, g, heads=None):
    """The selection of a policy. `heads`: repeats the key heads up to this number."""
    q, k = layered(g, "q", "k")
    k = np.repeat(k, (heads or k.shape[1]) // k.shape[1], axis=1)
    return select(policy, q, k, k, g["is_vision"])


def pairs(first, second) -> list[tuple[int, int]]:
    """Pairs of indices into two lists, each index at least once: a failure rarely depends on both."""
    a, b = len(first), len(second)
    return [(i % a, i % b) for i in range(max(a, b))]


def same_in_every_head(got, expected):
    """Asserts that `got` [L, K, ...] is `expected` [L, ...] in every head."""
    got, expected = np.asarray(got), np.asarray(expected)
    np.testing.assert_array_equal(got, np.broadcast_to(expected[:, None], got.shape))


def same_rows(got, want):
    """Asserts that two lists of vectors are equal up to their order."""
    got, want = np.asarray(got), np.asarray(want)
    nearest = abs(got[:, None] - want).max(axis=-1).argmin(axis=1)
    np.testing.assert_array_equal(np.sort(nearest), np.arange(len(want)))
    np.testing.assert_allclose(got, want[nearest], atol=2e-5)
