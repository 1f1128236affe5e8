"""The methods that the five papers compare with, and CSP, against the golden vectors."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies.golden_vectors import allocate, choose, compress, look_m, look_m_merges, same_in_every_head
from vlkv import policies
from vlkv.compression import merging

PRIORS = ("plain", "text_prior")

# --- VL-Cache -------------------------------------------------------------------------------------------------------


class Granted(policies.VLCache):
    """VL-Cache with the budgets of somebody else."""

    granted: tuple[int, ...] = ()

    def allocate(self, statistics, *, total, most, layers):
        return jnp.array(self.granted)


def test_vlcache_sparsity_scores_budgets_and_kept(golden):
    g = golden("vlcache")
    layers, heads, length = g["q"].shape[:3]
    for i, ratio in enumerate(g["budget_ratios"].tolist()):
        # Given the paper's own budgets, the kept sets are the paper's.
        granted = Granted(keep=1.0, granted=tuple(g[f"paper_layer_budgets_{i}"].tolist()))
        got = choose(granted, g)
        np.testing.assert_array_equal(got.kept, g[f"paper_kept_{i}"])
        np.testing.assert_allclose(got.extra["sparsity"], g["paper_sparsity"], rtol=1e-5)
        importance = got.scores * (heads // g["k"].shape[1])  # a mean over the group, where the paper has the sum
        np.testing.assert_allclose(importance, g["paper_token_importance_per_key_head"], rtol=1e-5)
        # The paper truncates each layer's share; ours hands out what that loses, so the total is exact.
        total, most = int(ratio * layers * length + 0.5), jnp.full(layers, length)
        ours = allocate(policies.VLCache(keep=ratio), got.extra, jnp.int32(total), most)
        assert ours.sum() == total
        fractions = g[f"paper_layer_budget_fractions_{i}"]
        if ((fractions > 0.01) & (fractions < 1)).all():  # else we also share out what the clip frees
            assert (abs(ours - fractions * length) < 1).all()


# --- Elastic Cache and LOOK-M ---------------------------------------------------------------------------------------


def test_elastic_cache_scores_kept_and_merged_entries(golden):
    g = golden("elastic")
    for i in range(len(g["drop_ratios"])):
        policy = policies.ElasticCache(
            budget=int(g[f"paper_kept_{i}"][0].sum()),
            sinks=int(g["number_of_sink_tokens"]),
            recent=int(g["number_of_recent_tokens"]),
        )
        k, v, got = compress(policy, g["q"], g["k"], g["v"], g["is_vision"])
        np.testing.assert_allclose(got.scores[:, 0], g["layer_scores"], rtol=1e-5)
        same_in_every_head(got.kept, g[f"paper_kept_{i}"])
        for layer, kept in enumerate(g[f"paper_kept_{i}"]):
            target = np.where(kept, -1, merging.nearest_place(jnp.asarray(kept)[None])[0])
            np.testing.assert_array_equal(target, g[f"paper_merge_target_{i}"][layer])
            for ours, name in ((k, "key"), (v, "value")):
                expected = g[f"paper_merged_{name}_{i}"][layer]
                np.testing.assert_allclose(ours[layer][:, kept], expected, rtol=1e-5, atol=1e-6)


def test_look_m_kept(golden, pairs):
    g = golden("lookm")
    for ratio, prior in pairs(g["ratio_pairs_heavy_recent"], PRIORS):
        got = look_m(g, ratio, PRIORS[prior])[1][2]
        np.testing.assert_array_equal(got.kept[0], g[f"paper_kept_{PRIORS[prior]}_ratio{ratio}"])
        if PRIORS[prior] == "plain":
            np.testing.assert_allclose(got.scores[0], g["column_sum_scores"], rtol=1e-5)


def test_look_m_merged_entries(golden, pairs):
    g = golden("lookm")
    ways = ("pivot", "average", "weighted")
    for way, prior in pairs(ways, PRIORS):
        look_m_merges(g, "paper", ways[way], PRIORS[prior])


# --- CSP ------------------------------------------------------------------------------------------------------------


def csp(g, c, **options):
    window = int(g["recent_size"])
    policy = policies.CSP(
        budget=int(g["selected_size"]) + window, window=window, c=c, score_n=float(g.get("softmax_n", 1)), **options
    )
    return choose(policy, g, g["paper_self_scores"].shape[0])


@pytest.mark.parametrize("name", ["csp_text_window", "csp_mixed_window"])
def test_csp_scores_union_and_filled_union(golden, pairs, name):
    g = golden(name)
    kept = g["paper_kept_union"], g["paper_kept_without_duplicates"]
    for i, fill in pairs(g["cross_ratios"], kept):
        got = csp(g, float(g["cross_ratios"][i]), heads="each", fill=bool(fill))
        for region in ("self", "cross"):
            expected = g[f"paper_{region}_scores"]
            np.testing.assert_allclose(got.extra[region][0, :, : expected.shape[1]], expected, rtol=1e-5)
        np.testing.assert_array_equal(got.kept[0], kept[fill][i])
        np.testing.assert_array_equal(got.budgets[0], kept[fill][i].sum(axis=-1))


def test_csp_with_the_share_that_cross_attention_has_spends_the_whole_budget(golden):
    g = golden("csp_mixed_window")
    got = csp(g, "auto", heads="each", fill=True)
    assert (np.asarray(got.kept).sum(axis=-1) == int(g["selected_size"] + g["recent_size"])).all()
    own = g["paper_self_scores"] + g["paper_cross_scores"]
    np.testing.assert_allclose(got.scores[0, :, : own.shape[1]], own, rtol=1e-5)
