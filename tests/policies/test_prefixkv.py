"""PrefixKV beyond its search: the published code's budgets, offline profiles, merging. Decoding: test_elastic.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies import numpy_policies as reference
from tests.policies.golden_vectors import choose, same_in_every_head, select
from vlkv import InputError, policies
from vlkv.policies.prefixkv import found_forget_counts, scaled_forget_counts


def released(**options):
    return policies.PrefixKV(variant="released", **options)


def test_the_published_codes_search_budgets_and_kept(golden, pairs):
    g = golden("prefixkv")
    layers, _, length = g["k"].shape[:3]
    recent = int(g["number_of_recent_tokens"])
    find = jax.jit(found_forget_counts, static_argnames="protected")
    for r, s in pairs(g["keep_ratios"], g["number_of_sink_tokens"]):
        sinks = int(g["number_of_sink_tokens"][s])
        got = choose(released(keep=float(g["keep_ratios"][r]), sinks=sinks, recent=recent), g)
        target = jnp.int32(layers * length - g["total_budget"][r])
        found = find(got.extra["cumulative"], target, jnp.full(layers, length), protected=sinks + recent)
        np.testing.assert_array_equal(found, g["as_released_forget_counts_from_obtain_cdf_num"][r, s])
        scaled = scaled_forget_counts(found, target)
        np.testing.assert_array_equal(scaled, g["as_released_forget_counts_rescaled"][r, s])
        same_in_every_head(got.budgets, g["as_released_budgets"][r, s])
        same_in_every_head(got.kept, g["as_released_kept"][r, s])


@pytest.mark.default("paper")
@pytest.mark.parametrize("variant", ["paper", "released"])
def test_a_profile_takes_the_place_of_the_search(variant):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, 2, 40, 8)).astype(np.float32)
    profile = (0.5, 0.1, 0.3)
    policy = policies.PrefixKV(keep=0.3, profile=profile, variant=variant)
    np.testing.assert_array_equal(select(policy, q, q, q, np.zeros(40, bool)).budgets[:, 0], [20, 4, 12])
    # Another budget in the same proportion: 18, 3.6, 10.8 -> largest remainders; a layer cannot have more than all.
    less = policies.PrefixKV(budget=11, profile=profile, variant=variant)
    expected = reference.apportion(33 * np.array(profile) / sum(profile), 33, 40, low=2)
    np.testing.assert_array_equal(select(less, q, q, q, np.zeros(40, bool)).budgets[:, 0], expected)
    more = policies.PrefixKV(keep=0.9, profile=profile, variant=variant)
    expected = reference.apportion(108 * np.array(profile) / sum(profile), 108, 40, low=2)
    assert expected[0] == 40
    equal = policies.PrefixKV(keep=0.3, profile=(0.7,), variant=variant)
    np.testing.assert_array_equal(select(equal, q, q, q, np.zeros(40, bool)).budgets[:, 0], [12, 12, 12])
    np.testing.assert_array_equal(select(more, q, q, q, np.zeros(40, bool)).budgets[:, 0], expected)


def test_a_profile_of_another_model_is_refused():
    q = np.ones((4, 2, 10, 8), np.float32)
    with pytest.raises(InputError, match="profile has 3 layers, the model has 4"):
        policies.select(policies.PrefixKV(keep=0.5, profile=(0.1, 0.2, 0.3)), q, q, q, np.zeros(10, bool))
