"""Options and sizes of methods that no other default test has; each finds a fault of `tests/mutants.json`."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from vlkv import policies
from vlkv.cache.decode_state import begin
from vlkv.policies.lightkv import scaled


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


@pytest.mark.parametrize(("fraction", "count"), [(0.53, 4300), (0.29, 100), (0.001, 100)])
def test_core_and_text_window_are_rounded_down_from_the_exact_product(fraction, count):
    """Of the tokens of an image, or of text. The first loses a token in float32, the second in double precision."""
    expected = int(Fraction(str(fraction)) * count)
    policy = policies.AVL(keep=0.6, core=fraction, text=fraction)
    everything = jnp.ones(count, bool)
    for is_vision, new in ((everything, 1), (~everything, 0)):
        state = jax.jit(begin, static_argnames="new_tokens")(
            everything[None], {}, is_vision, everything, jnp.int32(count), new_tokens=new
        )
        if new:
            assert np.sum(jax.jit(policy.pick)(state, jnp.zeros(state.stored.shape))) == max(1, expected)
        else:
            assert jax.jit(policy.window)(state) == expected


def test_equal_shares_choose_the_earlier_token_wherever_it_is_stored():
    policy, count = policies.AVL(keep=0.6, core=0.3), 20
    order = np.random.default_rng(0).permutation(count)
    state = begin(jnp.ones((1, count), bool), {}, *jnp.ones((2, count), bool), jnp.int32(count), new_tokens=0)
    state = dataclasses.replace(state, place=jnp.array(order)[None])
    chosen = policy.pick(state, jnp.zeros((1, count)).at[0, 7].set(1.0))
    rest = [place for place in range(count) if place != order[7]][:5]
    assert set(order[np.flatnonzero(chosen[0])]) == {order[7], *rest}


def test_nothing_leaves_where_new_tokens_do_not_count_or_it_is_told_not_to():
    assert policies.slots_of(policies.RoCo(keep=0.5)).step is not None
    assert policies.slots_of(policies.RoCo(keep=0.5, scope="vision")).step is None
    assert policies.slots_of(policies.RoCo(keep=0.5, evict=False)).step is None
    for off in (policies.StreamingLLM(keep=0.5), policies.StreamingLLM(keep=0.5, evict=True, scope="vision")):
        assert policies.slots_of(off).step is None


def test_a_text_window_of_a_fixed_length():
    every = jnp.ones((1, 9), bool)
    state = begin(every, {}, ~every[0], every[0], jnp.int32(9), new_tokens=3)
    assert policies.AVL(keep=0.5, text=0.5, longest_text=5).window(state) == 2
    assert policies.AVL(keep=0.5, text=0.5).window(state) == 6
