"""A-VL's ordinary steps do not read what is stored but not in the core, whatever it holds."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cache.test_decode_state import one_layer
from vlkv import policies
from vlkv.cache.attention import _listed, attend_to
from vlkv.cache.decode_state import arrive, begin

LENGTH, HEADS, GROUPS, DIM, NEW = 70, 2, 2, 8, 4


@pytest.fixture(scope="module")
def step():
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(n, LENGTH, DIM)).astype(np.float32) for name, n in zip("qkv", (4, 2, 2))}  # noqa: B905
    arrays["is_vision"] = (np.arange(LENGTH) >= 8) & (np.arange(LENGTH) < 58)
    cache, _ = one_layer(policies.AVL(keep=0.6, core=0.2, refresh=2), arrays, new_tokens=NEW)
    q = jnp.array(rng.normal(size=(1, HEADS * GROUPS, DIM)), jnp.float32)
    tail = jnp.array(rng.normal(size=(2, 1, HEADS, NEW, DIM)), jnp.float32)
    return cache, jax.jit(jax.vmap(arrive))(cache.decode_states[0])[0], q, tail


def answer(step, state, k, v, kernels=None):
    cache, _, q, tail = step
    segment = k, v, cache.start[0], cache.extent[0]
    run = jax.jit(attend_to, static_argnames="kernels")
    return run(q, segment, tuple(tail), jnp.array([1]), state, kernels=kernels)


@pytest.mark.full
def test_an_ordinary_step_does_not_read_what_is_not_in_the_core(step):
    cache, state, _, _ = step
    most = state.attended.shape[-1] - NEW
    aside = np.asarray(state.stored & ~state.attended)[0, 0, :most]
    assert aside.sum() == 30 - 10 and state.core_only.all()
    start = int(cache.start[0, 0, 0])
    slots = start + np.flatnonzero(aside)
    poisoned = (cache.k.at[:, :, slots].set(jnp.nan), cache.v.at[:, :, slots].set(jnp.nan))
    for got, want in zip(answer(step, state, *poisoned), answer(step, state, cache.k, cache.v), strict=True):
        np.testing.assert_array_equal(got, want)
    refreshed = jax.vmap(cache.policy.updater.step)(state, jnp.zeros((1, HEADS * GROUPS, most + NEW)))
    assert not refreshed.core_only.any()  # the second step is a refresh: it reads everything
    assert np.isnan(answer(step, refreshed, *poisoned)[0]).any()


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


@pytest.mark.full
def test_where_heads_differ_no_list_is_used(step):
    _, state, _, _ = step
    policy = policies.AVL(keep=0.6, core=0.2, refresh=5)
    core = state.core.at[0, 1].set(jnp.roll(state.core[0, 1], 1))
    one = jax.tree.map(lambda x: x[0], dataclasses.replace(state, core=core))
    made = jax.jit(policy.prepare)(one)
    assert made.core_only and not _listed(made)[-1] and (made.attended[0] != made.attended[1]).any()


def test_equal_shares_choose_the_earlier_token_wherever_it_is_stored():
    policy, count = policies.AVL(keep=0.6, core=0.3), 20
    order = np.random.default_rng(0).permutation(count)
    state = begin(jnp.ones((1, count), bool), {}, *jnp.ones((2, count), bool), jnp.int32(count), new_tokens=0)
    state = dataclasses.replace(state, place=jnp.array(order)[None])
    chosen = policy.pick(state, jnp.zeros((1, count)).at[0, 7].set(1.0))
    rest = [place for place in range(count) if place != order[7]][:5]
    assert set(order[np.flatnonzero(chosen[0])]) == {order[7], *rest}
