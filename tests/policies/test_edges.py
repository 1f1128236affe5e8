"""Options and sizes of methods that no other default test has; each finds a fault of `tests/mutants.json`."""

import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from vlkv import policies
from vlkv.compression.tokens import Tokens
from vlkv.policies.lightkv import scaled


def test_downsample_counts_what_tokens_stand_for():
    tokens = Tokens(
        x=jnp.array([[0.0], [8.0], [4.0], [4.0]]), positions=jnp.arange(4)[:, None], is_vision=jnp.ones(4, bool),
        valid=jnp.ones(4, bool), source=jnp.arange(4), size=jnp.array([1.0, 5.0, 1.0, 1.0]),
        grid=jnp.array([(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]),
    )  # fmt: skip
    made, kept = policies.Downsample().reduce(tokens, None, stage=0)
    np.testing.assert_array_equal(kept, [True, False, False, False])
    assert (float(made.x[0, 0]), float(made.size[0])) == (6.0, 8.0)


def test_three_different_layers_whatever_the_factor():
    for depth in range(4, 41):
        for factor in (0.05, 0.3, 0.9, 1.3, 3.0):
            first, second, third = scaled(depth, factor)
            assert 0 < first < second < third < depth


def test_all_of_the_budget_may_be_recent():
    assert policies.H2O(keep=0.5, recent=1.0).recent == 1.0
    with pytest.raises(vlkv.InputError, match=r"recent=1\.5"):
        policies.H2O(keep=0.5, recent=1.5)
