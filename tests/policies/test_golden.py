"""Policies against the golden vectors: masks exactly, scores to 1e-5 (see tests/golden/README.md)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies.golden_vectors import allocate, choose, same_in_every_head
from vlkv import policies
from vlkv.compression import budgets
from vlkv.compression.sizes import budget_of

# --- StreamingLLM and H2O -------------------------------------------------------------------------------------------


def test_streaming_llm_keeps_what_the_released_code_keeps(golden):
    g = golden("streaming_h2o")
    capacity, window = int(g["capacity"]), int(g["window_size"])
    expected = g["as_released_streaming_kept"]
    got = choose(policies.StreamingLLM(budget=capacity, sinks=capacity - window), g, len(expected))
    np.testing.assert_array_equal(got.kept[0], expected)


def test_h2o_keeps_what_the_released_codes_keep(golden):
    g = golden("streaming_h2o")
    by_window = policies.H2O(budget=int(g["capacity"]), recent=int(g["window_size"]))
    recent = int(g["recent_size"])
    by_recent = policies.H2O(budget=int(g["heavy_hitter_size"]) + recent, recent=recent)
    for policy, name in (
        (by_window, "kvfactory_kept_per_query_head"),
        (by_window, "kvfactory_kept_per_key_head_mean"),
        (by_recent, "fminference_kept"),
    ):
        expected = g[f"as_released_h2o_{name}"]
        got = choose(policy, g, len(expected))
        np.testing.assert_array_equal(got.kept[0], expected)
        if len(expected) == len(g["q"]):
            np.testing.assert_allclose(got.scores[0], g["paper_column_sum_scores"], rtol=1e-5)


# --- SnapKV and PyramidKV -------------------------------------------------------------------------------------------


def test_snapkv_scores_and_kept(golden, pairs):
    g = golden("snapkv")
    ways = ("per_query_head", "per_key_head_mean")
    for i, way in pairs(g["pooling"], ways):
        policy = policies.SnapKV(
            budget=int(g["capacities"][i]),
            window=int(g["window_sizes"][i]),
            kernel=int(g["kernel_sizes"][i]),
            pooling=str(g["pooling"][i]).removesuffix("pool"),
        )
        expected = g[f"paper_scores_{ways[way]}_{i}"]
        got = choose(policy, g, len(expected))
        np.testing.assert_allclose(got.scores[0, :, : -policy.window], expected, rtol=1e-5)
        assert got.kept[0, :, -policy.window :].all()
        if policy.pooling == "avg":  # max pooling ties by construction
            for source in ("paper", "as_released"):
                np.testing.assert_array_equal(got.kept[0], g[f"{source}_kept_{ways[way]}_{i}"])


def test_pyramidkv_scores(golden):
    g = golden("pyramidkv")
    window, expected = int(g["window_size"]), g["paper_scores"]
    policy = policies.PyramidKV(budget=int(g["capacity"]), window=window, kernel=int(g["kernel_size"]), pooling="avg")
    np.testing.assert_allclose(choose(policy, g, len(expected)).scores[0, :, :-window], expected, rtol=1e-5)


def test_pyramidkv_budgets_follow_the_papers_line_and_sum_exactly(golden):
    g = golden("pyramidkv")
    rows = g["budget_table_layers_capacity_window_length"].tolist()
    for (layers, capacity, window, length), line in zip(
        rows, g["paper_real_valued_tokens_kept_per_layer"], strict=True
    ):
        policy = policies.PyramidKV(budget=capacity, window=window, beta=int(g["beta"]))
        total = int(budget_of(policy, layers=layers, most=length, text=length).nominal[-1])
        got = np.asarray(allocate(policy, {}, jnp.int32(total), jnp.full(layers, length, jnp.int32)))
        assert got.sum() == total == layers * min(capacity, length)
        assert got.max() <= length
        assert (np.diff(got) <= 0).all()
        if line[:layers].max() <= length:
            assert np.abs(got - line[:layers]).max() < 1


# --- AdaKV ----------------------------------------------------------------------------------------------------------


def test_adakv_keeps_what_kvpress_does_not_mask(root):
    g = dict(np.load(root / "tests" / "golden" / "adakv.npz"))
    g["is_vision"] = np.zeros(g["q"].shape[2], bool)
    policy = policies.AdaKV(
        budget=int(g["budget"]), window=int(g["window"]), kernel=int(g["kernel"]), pooling="avg", safeguard=0.0
    )
    got = choose(policy, g)
    np.testing.assert_array_equal(got.kept, g["as_released_kept"])
    assert len(np.unique(got.budgets)) > 1


# --- AirCache -------------------------------------------------------------------------------------------------------


def test_aircache_elite_importance_strength_skewness_budgets_and_kept(golden, pairs):
    g = golden("aircache")
    vision = g["is_vision"]
    instruction = np.arange(len(vision)) > np.flatnonzero(vision)[-1]
    for a, r in pairs(g["elite_alphas"], g["budget_ratios"]):
        got = choose(policies.AirCache(keep=float(g["budget_ratios"][r]), alpha=float(g["elite_alphas"][a])), g)
        observers = np.asarray(got.extra["observers"])
        np.testing.assert_array_equal(observers[:, instruction], g[f"paper_elite_text_alpha{a}"])
        assert not observers[:, ~instruction].any()
        importance = np.asarray(got.scores)[:, :, vision]
        expected = np.broadcast_to(g[f"paper_vision_importance_alpha{a}"][:, None], importance.shape)
        np.testing.assert_allclose(importance, expected, rtol=1e-5)
        np.testing.assert_allclose(got.extra["strength"], g[f"paper_strength_alpha{a}"], rtol=1e-5)
        np.testing.assert_allclose(got.extra["skewness"], g[f"paper_skewness_alpha{a}"], rtol=1e-5, atol=1e-6)
        same_in_every_head(got.budgets, g[f"paper_budgets_alpha{a}_ratio{r}"])
        same_in_every_head(got.kept, g[f"paper_kept_alpha{a}_ratio{r}"])


def test_apportion_clips_and_redistributes(golden):
    g = golden("aircache")
    most = int(g["clip_test_number_of_vision_tokens"])
    apportion = jax.jit(lambda real, total: budgets.apportion(real, total, floor=1, ceiling=jnp.int32(most)))
    for ratios, expected in zip(g["clip_test_layer_ratios"], g["paper_clip_test_budgets"], strict=True):
        total = int(np.floor((ratios * most).sum() + 0.5))
        np.testing.assert_array_equal(apportion(jnp.float32(ratios * most), jnp.int32(total)), expected)


# --- PrefixKV -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_prefixkv_budgets_and_kept_for_every_number_of_sinks(golden, pairs):
    g = golden("prefixkv")
    for r, s in pairs(g["keep_ratios"], g["number_of_sink_tokens"]):
        policy = policies.PrefixKV(
            keep=float(g["keep_ratios"][r]),
            sinks=int(g["number_of_sink_tokens"][s]),
            recent=int(g["number_of_recent_tokens"]),
        )
        got = choose(policy, g)
        np.testing.assert_allclose(got.scores[:, 0], g["layer_scores"], rtol=1e-5)
        assert (np.asarray(got.budgets).sum(axis=0) == g["total_budget"][r]).all()
        same_in_every_head(got.budgets, g["paper_budgets"][r])
        same_in_every_head(got.kept, g["paper_kept"][r, s])
