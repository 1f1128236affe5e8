"""Policies against the golden vectors: masks exactly, scores to 1e-5 (see tests/golden/README.md)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlkv import budgets, policies

select = jax.jit(policies.select)


def kept(policy, arrays, **change):
    return np.asarray(choose(policy, arrays, **change).kept)


def choose(policy, arrays, repeat=1):
    """`repeat`: once per query head, by handing in every key head G times."""
    q, k = (arrays[name] if arrays[name].ndim == 4 else arrays[name][None] for name in ("q", "k"))
    k = np.repeat(k, repeat, axis=1)
    return select(policy, q, k, k, arrays["is_vision"])


# --- StreamingLLM and H2O -------------------------------------------------------------------------------------------


def test_streaming_llm_keeps_what_the_released_code_keeps(golden):
    g = golden("streaming_h2o")
    capacity, window = int(g["capacity"]), int(g["window_size"])
    got = kept(policies.StreamingLLM(budget=capacity, sinks=capacity - window), g, repeat=2)[0]
    np.testing.assert_array_equal(got, g["as_released_streaming_kept"])


@pytest.mark.parametrize(
    ("expected", "repeat", "recent"),
    [
        ("as_released_h2o_kvfactory_kept_per_query_head", 2, "window_size"),
        ("as_released_h2o_kvfactory_kept_per_key_head_mean", 1, "window_size"),
        ("as_released_h2o_fminference_kept", 2, "recent_size"),
    ],
)
def test_h2o_keeps_what_the_released_codes_keep(golden, expected, repeat, recent):
    g = golden("streaming_h2o")
    policy = policies.H2O(budget=int(g["capacity"]), recent=int(g[recent]))
    np.testing.assert_array_equal(kept(policy, g, repeat=repeat)[0], g[expected])


def test_h2o_scores_are_the_column_sums_per_query_head(golden):
    g = golden("streaming_h2o")
    scores = choose(policies.H2O(budget=64, recent=24), g, repeat=2).scores[0]
    np.testing.assert_allclose(scores, g["paper_column_sum_scores"], rtol=1e-5)


# --- SnapKV and PyramidKV -------------------------------------------------------------------------------------------


def snapkv(g, i):
    return policies.SnapKV(
        budget=int(g["capacities"][i]),
        window=int(g["window_sizes"][i]),
        kernel=int(g["kernel_sizes"][i]),
        pooling=str(g["pooling"][i]).removesuffix("pool"),
    )


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize(("heads", "repeat"), [("per_query_head", 2), ("per_key_head_mean", 1)])
def test_snapkv_scores_and_kept(golden, i, heads, repeat):
    g = golden("snapkv")
    policy = snapkv(g, i)
    got = choose(policy, g, repeat=repeat)
    before_window = np.asarray(got.scores)[0, :, : -policy.window]
    np.testing.assert_allclose(before_window, g[f"paper_scores_{heads}_{i}"], rtol=1e-5)
    assert np.asarray(got.kept)[0, :, -policy.window :].all()
    if policy.pooling == "avg":  # max pooling ties by construction
        for source in ("paper", "as_released"):
            np.testing.assert_array_equal(np.asarray(got.kept)[0], g[f"{source}_kept_{heads}_{i}"])


def test_pyramidkv_scores(golden):
    g = golden("pyramidkv")
    window = int(g["window_size"])
    policy = policies.PyramidKV(budget=int(g["capacity"]), window=window, kernel=int(g["kernel_size"]), pooling="avg")
    scores = np.asarray(choose(policy, g).scores)[0, :, :-window]
    np.testing.assert_allclose(scores, g["paper_scores"], rtol=1e-5)


@pytest.mark.parametrize("row", range(8))
def test_pyramidkv_budgets_follow_the_papers_line_and_sum_exactly(golden, row):
    g = golden("pyramidkv")
    layers, capacity, window, length = (int(x) for x in g["budget_table_layers_capacity_window_length"][row])
    policy = policies.PyramidKV(budget=capacity, window=window, beta=int(g["beta"]))
    total = int(policy.totals(layers=layers, most=length)[-1])
    got = np.asarray(
        policy.allocate({}, total=jnp.int32(total), most=jnp.full(layers, length, jnp.int32), layers=layers)
    )
    line = g["paper_real_valued_tokens_kept_per_layer"][row, :layers]
    assert got.sum() == total == layers * min(capacity, length)
    assert got.max() <= length
    assert (np.diff(got) <= 0).all()
    if line.max() <= length:
        assert np.abs(got - line).max() < 1


# --- AirCache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", range(4))
def test_aircache_elite_importance_strength_and_skewness(golden, alpha):
    g = golden("aircache")
    vision = g["is_vision"]
    got = choose(policies.AirCache(keep=0.1, alpha=float(g["elite_alphas"][alpha])), g)
    instruction = np.arange(len(vision)) > np.flatnonzero(vision)[-1]
    observers = np.asarray(got.extra["observers"])
    np.testing.assert_array_equal(observers[:, instruction], g[f"paper_elite_text_alpha{alpha}"])
    assert not observers[:, ~instruction].any()
    for head in range(2):
        importance = np.asarray(got.scores)[:, head, vision]
        np.testing.assert_allclose(importance, g[f"paper_vision_importance_alpha{alpha}"], rtol=1e-5)
    np.testing.assert_allclose(got.extra["strength"], g[f"paper_strength_alpha{alpha}"], rtol=1e-5)
    np.testing.assert_allclose(got.extra["skewness"], g[f"paper_skewness_alpha{alpha}"], rtol=1e-5)


@pytest.mark.parametrize("alpha", range(4))
@pytest.mark.parametrize("ratio", range(4))
def test_aircache_budgets_and_kept(golden, alpha, ratio):
    g = golden("aircache")
    policy = policies.AirCache(keep=float(g["budget_ratios"][ratio]), alpha=float(g["elite_alphas"][alpha]))
    got = choose(policy, g)
    for head in range(2):
        np.testing.assert_array_equal(got.budgets[:, head], g[f"paper_budgets_alpha{alpha}_ratio{ratio}"])
        np.testing.assert_array_equal(got.kept[:, head], g[f"paper_kept_alpha{alpha}_ratio{ratio}"])


@pytest.mark.parametrize("i", range(4))
def test_apportion_clips_and_redistributes(golden, i):
    g = golden("aircache")
    most = int(g["clip_test_number_of_vision_tokens"])
    real = g["clip_test_layer_ratios"][i] * most
    total = int(np.floor(real.sum() + 0.5))
    got = budgets.apportion(jnp.float32(real), jnp.int32(total), floor=1, ceiling=jnp.int32(most))
    np.testing.assert_array_equal(got, g["paper_clip_test_budgets"][i])


# --- PrefixKV -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", range(4))
def test_prefixkv_budgets_and_kept_for_every_number_of_sinks(golden, ratio):
    g = golden("prefixkv")
    for i, sinks in enumerate(g["number_of_sink_tokens"]):
        got = choose(policies.PrefixKV(keep=float(g["keep_ratios"][ratio]), sinks=int(sinks)), g)
        np.testing.assert_allclose(np.asarray(got.scores)[:, 0], g["layer_scores"], rtol=1e-5)
        np.testing.assert_array_equal(np.asarray(got.budgets).sum(axis=0), g["total_budget"][ratio])
        for head in range(4):
            np.testing.assert_array_equal(got.budgets[:, head], g["paper_budgets"][ratio])
            np.testing.assert_array_equal(got.kept[:, head], g["paper_kept"][ratio, i])
