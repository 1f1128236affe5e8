"""The methods that the five papers compare with, and CSP, against the golden vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlkv import merging, policies

select = jax.jit(policies.select)


# --- VL-Cache -------------------------------------------------------------------------------------------------------


@policies.policy
class Granted(policies.VLCache):
    """VL-Cache with the budgets of somebody else."""

    granted: tuple[int, ...] = ()

    def allocate(self, statistics, *, total, most, layers):
        return jnp.array(self.granted)


@pytest.mark.parametrize("i", range(2))
def test_vlcache_sparsity_scores_budgets_and_kept(golden, i):
    g = golden("vlcache")
    layers, length = g["q"].shape[0], g["q"].shape[2]
    arrays = g["q"], g["k"], g["k"], g["is_vision"]
    ratio = float(g["budget_ratios"][i])
    got = select(policies.VLCache(keep=ratio), *arrays)
    np.testing.assert_allclose(got.extra["sparsity"], g["paper_sparsity"], rtol=1e-5)
    np.testing.assert_allclose(2 * got.scores, g["paper_token_importance_per_key_head"], rtol=1e-5)
    # The paper truncates each layer's share; ours hands out what that loses, so the total is exact.
    assert (np.asarray(got.budgets).sum(axis=0) == int(ratio * layers * length + 0.5)).all()
    shares = g[f"paper_layer_budget_fractions_{i}"] * length
    assert (abs(np.asarray(got.budgets) - shares[:, None]) < 1).all()
    # Given the paper's own budgets, the kept sets are the paper's.
    granted = Granted(keep=ratio, granted=tuple(g[f"paper_layer_budgets_{i}"].tolist()))
    np.testing.assert_array_equal(select(granted, *arrays).kept, g[f"paper_kept_{i}"])


# --- Elastic Cache and LOOK-M ---------------------------------------------------------------------------------------

compress = jax.jit(policies.compress)


@pytest.mark.parametrize("i", range(2))
def test_elastic_cache_scores_kept_and_merged_entries(golden, i):
    g = golden("elastic")
    policy = policies.ElasticCache(
        budget=int(g[f"paper_kept_{i}"][0].sum()),
        sinks=int(g["number_of_sink_tokens"]),
        recent=int(g["number_of_recent_tokens"]),
    )
    k, v, got = compress(policy, g["q"], g["k"], g["v"], g["is_vision"])
    np.testing.assert_allclose(got.scores[:, 0], g["layer_scores"], rtol=1e-5)
    for layer, kept in enumerate(g[f"paper_kept_{i}"]):
        np.testing.assert_array_equal(got.kept[layer], np.stack([kept] * 4))
        target = np.where(kept, -1, merging.nearest_place(jnp.asarray(kept)[None])[0])
        np.testing.assert_array_equal(target, g[f"paper_merge_target_{i}"][layer])
        np.testing.assert_allclose(k[layer][:, kept], g[f"paper_merged_key_{i}"][layer], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(v[layer][:, kept], g[f"paper_merged_value_{i}"][layer], rtol=1e-5, atol=1e-6)


def look_m(g, ratio, prior, way="none"):
    hh, recent = (int(624 * share) for share in g["ratio_pairs_heavy_recent"][ratio])
    policy = policies.LookM(budget=hh + recent, recent=recent, text_prior=prior == "text_prior", merging=way)
    return compress(policy, *(g[name][None] for name in ("q", "k", "v")), g["is_vision"])


@pytest.mark.parametrize("ratio", range(3))
@pytest.mark.parametrize("prior", ["plain", "text_prior"])
def test_look_m_kept(golden, ratio, prior):
    g = golden("lookm")
    got = look_m(g, ratio, prior)[2]
    np.testing.assert_array_equal(got.kept[0], g[f"paper_kept_{prior}_ratio{ratio}"])
    if prior == "plain":
        np.testing.assert_allclose(got.scores[0], g["column_sum_scores"], rtol=1e-5)


@pytest.mark.parametrize("prior", ["plain", "text_prior"])
@pytest.mark.parametrize("way", ["average", "weighted", "pivot"])
def test_look_m_merged_entries(golden, prior, way):
    g = golden("lookm")
    k, v, got = look_m(g, 0, prior, way)
    for head, kept in enumerate(np.asarray(got.kept[0])):
        np.testing.assert_allclose(k[0, head][kept], g[f"paper_merged_key_{way}_{prior}"][head], atol=2e-5)
        np.testing.assert_allclose(v[0, head][kept], g[f"paper_merged_value_{way}_{prior}"][head], atol=2e-5)


# --- CSP ------------------------------------------------------------------------------------------------------------


def csp(g, i, **options):
    budget = int(g["selected_size"] + g["recent_size"])
    policy = policies.CSP(
        budget=budget, window=int(g["recent_size"]), c=float(g["cross_ratios"][i]), heads="each", **options
    )
    return select(policy, *(g[name][None] for name in ("q", "k", "k")), g["is_vision"])


@pytest.mark.parametrize("name", ["csp_text_window", "csp_mixed_window"])
@pytest.mark.parametrize("i", range(3))
def test_csp_scores_union_and_filled_union(golden, name, i):
    g = golden(name)
    got = csp(g, i)
    for region in ("self", "cross"):
        before = np.asarray(got.extra[region])[0, :, : -int(g["recent_size"])]
        np.testing.assert_allclose(before, g[f"paper_{region}_scores"], rtol=1e-5)
    np.testing.assert_array_equal(got.kept[0], g["paper_kept_union"][i])
    np.testing.assert_array_equal(got.budgets[0], g["paper_kept_union"][i].sum(axis=-1))
    np.testing.assert_array_equal(csp(g, i, fill=True).kept[0], g["paper_kept_without_duplicates"][i])


def test_csp_scores_do_not_change_with_the_share_of_the_cross_list(golden):
    g = golden("csp_mixed_window")
    auto = policies.CSP(budget=120, window=40, c="auto", heads="each", fill=True)
    got = select(auto, *(g[name][None] for name in ("q", "k", "k")), g["is_vision"])
    np.testing.assert_array_equal(got.scores, csp(g, 0).scores)
    assert (np.asarray(got.kept).sum(axis=-1) == 120).all()
