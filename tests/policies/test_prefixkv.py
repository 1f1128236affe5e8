"""PrefixKV beyond its search: the published code's budgets, offline profiles, merging. Decoding: test_elastic.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies import numpy_policies as reference
from tests.policies.golden_vectors import choose, compress, same_in_every_head, select
from vlkv import InputError, policies
from vlkv.compression.sizes import cache_spec, total_bound
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


@pytest.mark.full
@pytest.mark.parametrize("keep", [1e-6, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("scope", ["all", "vision"])
def test_the_published_budgets_fit_the_pool_for_any_prompt(keep, scope):
    """Also where the published code stops with an error; padded on the left, budgets from nothing to everything."""
    layers, most = 4, 40
    q = 2 * np.random.default_rng(0).normal(size=(layers, 2, most, 4)).astype(np.float32)
    policy = released(keep=keep, scope=scope)
    for length in (1, 2, 3, 7, 38, 40):
        valid = np.arange(most) >= most - length
        got = select(policy, q, q, q, valid, valid)
        budgets = np.asarray(got.budgets)[:, 0]
        exact = reference.total_budget(layers, length, keep)
        assert (np.asarray(got.kept).sum(axis=-1) == budgets[:, None]).all()
        assert exact - layers < budgets.sum() <= min(exact + layers - 1, layers * length)
        assert (budgets >= 1).all()
        bounds = {"vision": length, "text": 0} if scope == "vision" else {"vision": 0, "text": length}
        assert budgets.sum() <= total_bound(policy, layers=layers, **bounds)
        assert cache_spec(policy, layers=layers, **bounds, new_tokens=0).allocated() >= (-(-budgets // 16) * 16).sum()


@pytest.mark.default("cosine")
@pytest.mark.parametrize("merging", ["position", "cosine"])
def test_dropped_entries_are_averaged_into_the_kept_entry_that_matches(merging):
    """Table 12, in float64; keys decide, values follow, each head by itself; padding gives nothing."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 2, 30, 8)).astype(np.float32)
    valid = np.arange(30) >= 4
    policy = policies.PrefixKV(keep=0.3, merging=merging)
    got_k, got_v, got = compress(policy, q, k, v, np.zeros(30, bool), valid)
    np.testing.assert_array_equal(
        got.kept, select(policies.PrefixKV(keep=0.3), q, k, v, np.zeros(30, bool), valid).kept
    )
    for layer in range(2):
        kept = np.asarray(got.kept)[layer][:, valid]
        expected = reference.merged(k[layer][:, valid], v[layer][:, valid], kept, merging)
        for ours, theirs in zip((got_k, got_v), expected, strict=True):
            np.testing.assert_allclose(np.asarray(ours)[layer][:, valid][kept], theirs[kept], atol=1e-5)


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
    np.testing.assert_array_equal(select(more, q, q, q, np.zeros(40, bool)).budgets[:, 0], expected)


def test_a_profile_of_another_model_is_refused():
    q = np.ones((4, 2, 10, 8), np.float32)
    with pytest.raises(InputError, match="profile has 3 layers, the model has 4"):
        policies.select(policies.PrefixKV(keep=0.5, profile=(0.1, 0.2, 0.3)), q, q, q, np.zeros(10, bool))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"profile": (0.5, 0.0)}, "profile=.* must be a tuple of numbers in"),
        ({"merging": "cosine", "cap": 2.0}, "cap=2.0 cannot be combined with merging"),
    ],
)
def test_a_bad_option_is_named(bad, said):
    with pytest.raises(InputError, match=said):
        policies.PrefixKV(keep=0.5, **bad)
