"""Options and sizes of methods that no other default test has; each finds a fault of `tests/mutants.json`."""

import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from vlkv import policies
from vlkv.cache.decode_state import begin
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


def test_csp_may_observe_half_of_what_it_keeps():
    for keep, length in ((0.5, 64), (0.1, 100), (1.0, 7)):
        assert policies.CSP(keep=keep).most_rows(length) >= max(1, round(keep * length) // 2)


def test_avl_has_slots_for_vision_the_text_window_and_one_token():
    """Five vision tokens, four of text, of which half may be stored."""
    policy, vision = policies.AVL(keep=0.5, core=0.5, text=0.5), jnp.arange(9) < 5
    every = jnp.ones((2, 9), bool)
    state = begin(every, {}, vision, every[0], jnp.int32(5), new_tokens=3)
    np.testing.assert_array_equal(policy.decode_slots(state), 5 + policy.window(state) + 1)


def test_both_ends_of_a_range_are_allowed():
    for alpha in (0, 1):
        assert policies.AirCache(keep=1.0, alpha=alpha).alpha == alpha
    with pytest.raises(vlkv.InputError, match=r"alpha=1\.01 must lie in \[0, 1\]"):
        policies.AirCache(keep=1.0, alpha=1.01)
