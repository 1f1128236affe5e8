"""Policies against golden vectors of the papers' equations and of published code (see tests/golden/README.md)."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies import numpy_policies as reference
from tests.policies.golden_vectors import allocate, choose, compress, layered, pairs, same_in_every_head, select
from vlkv import InputError, policies
from vlkv.compression.sizes import budget_of, total_bound

SOURCES = {"paper": "paper", "released": "as_released"}
PRIORS = ("plain", "text_prior")
both_variants = pytest.mark.parametrize("variant", SOURCES)


def test_streaming_llm(golden):
    g = golden("streaming_h2o")
    capacity, window, expected = int(g["capacity"]), int(g["window_size"]), g["as_released_streaming_kept"]
    got = choose(policies.StreamingLLM(budget=capacity, sinks=capacity - window), g, len(expected))
    np.testing.assert_array_equal(got.kept[0], expected)


def test_h2o(golden):
    g = golden("streaming_h2o")
    recent = int(g["recent_size"])
    by_window = policies.H2O(budget=int(g["capacity"]), recent=int(g["window_size"]))
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


def test_snapkv(golden):
    g, ways = golden("snapkv"), ("per_query_head", "per_key_head_mean")
    for i, way in pairs(g["pooling"], ways):
        policy = policies.SnapKV(
            budget=int(g["capacities"][i]), window=int(g["window_sizes"][i]), kernel=int(g["kernel_sizes"][i]),
            pooling=str(g["pooling"][i]).removesuffix("pool"),
        )  # fmt: skip
        expected = g[f"paper_scores_{ways[way]}_{i}"]
        got = choose(policy, g, len(expected))
        np.testing.assert_allclose(got.scores[0, :, : -policy.window], expected, rtol=1e-5)
        assert got.kept[0, :, -policy.window :].all()
        for source in SOURCES.values() if policy.pooling == "avg" else ():  # max pooling ties by construction
            np.testing.assert_array_equal(got.kept[0], g[f"{source}_kept_{ways[way]}_{i}"])


def test_pyramidkv(golden):
    g = golden("pyramidkv")
    options = dict(budget=int(g["capacity"]), window=int(g["window_size"]), kernel=int(g["kernel_size"]), pooling="avg")
    expected = g["paper_scores"]
    got = choose(policies.PyramidKV(**options), g, len(expected))
    np.testing.assert_allclose(got.scores[0, :, : -options["window"]], expected, rtol=1e-5)
    layers, heads, _ = g["as_released_kept"].shape
    every = {**g, **{name: np.broadcast_to(g[name], (layers, *g[name].shape)) for name in ("q", "k")}}
    released = policies.PyramidKV(**options, beta=int(g["beta"]), variant="released")
    np.testing.assert_array_equal(choose(released, every, heads).kept, g["as_released_kept"])


@both_variants
def test_budgets_of_pyramidkv(golden, variant):
    """The paper's line, and exact sums; released: its very numbers."""
    g = golden("pyramidkv")
    rows = g["budget_table_layers_capacity_window_length"].tolist()
    lines, released = g["paper_real_valued_tokens_kept_per_layer"], g["as_released_tokens_kept_per_layer"]
    longest = max(length for *_, length in rows)
    for (layers, capacity, window, length), line, expected in zip(rows, lines, released, strict=True):
        policy = policies.PyramidKV(budget=capacity, window=window, beta=int(g["beta"]), variant=variant)
        budget = budget_of(policy, layers=layers, most=longest, text=longest)
        total, most = int(budget.nominal[length]), jnp.full(layers, length, jnp.int32)
        statistics = {} if variant == "paper" else {"mean": jnp.minimum(capacity, most), "count": most}
        got = np.asarray(allocate(policy, statistics, jnp.int32(total), most))
        if variant == "released":
            np.testing.assert_array_equal(got, expected[:layers])
            assert budget.total[length] == got.sum()
            continue
        assert got.sum() == total == layers * min(capacity, length)
        assert got.max() <= length and (np.diff(got) <= 0).all()
        assert line[:layers].max() > length or np.abs(got - line[:layers]).max() < 1


def test_adakv_keeps_what_kvpress_does_not_mask(root):
    g = dict(np.load(root / "tests" / "golden" / "adakv.npz"))
    g["is_vision"] = np.zeros(g["q"].shape[2], bool)
    options = {name: int(g[name]) for name in ("budget", "window", "kernel")}
    got = choose(policies.AdaKV(**options, pooling="avg", safeguard=0.0), g)
    np.testing.assert_array_equal(got.kept, g["as_released_kept"])
    assert len(np.unique(got.budgets)) > 1


def test_aircache(golden):
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


@both_variants
def test_prefixkv(golden, variant):
    g = golden("prefixkv")
    for r, s in pairs(g["keep_ratios"], g["number_of_sink_tokens"]):
        sinks, recent = int(g["number_of_sink_tokens"][s]), int(g["number_of_recent_tokens"])
        policy = policies.PrefixKV(keep=float(g["keep_ratios"][r]), sinks=sinks, recent=recent, variant=variant)
        got = choose(policy, g)
        np.testing.assert_allclose(got.scores[:, 0], g["layer_scores"], rtol=1e-5)
        assert variant == "released" or (np.sum(got.budgets, axis=0) == g["total_budget"][r]).all()
        same_in_every_head(got.budgets, g["paper_budgets"][r] if variant == "paper" else g["as_released_budgets"][r, s])
        same_in_every_head(got.kept, g[f"{SOURCES[variant]}_kept"][r, s])


@both_variants
def test_a_profile_takes_the_place_of_the_search(variant):
    """The first keep is that of the profile; others get its proportion, and no layer more than there is."""
    q, profile = np.random.default_rng(0).normal(size=(3, 2, 40, 8)).astype(np.float32), (0.5, 0.1, 0.3)
    for options, total in (({"keep": 0.3}, 36), ({"budget": 11}, 33), ({"keep": 0.9}, 108)):
        policy = policies.PrefixKV(**options, profile=profile, variant=variant)
        expected = reference.apportion(total * np.array(profile) / sum(profile), total, 40, low=2)
        assert total != 36 or expected == [20, 4, 12]
        np.testing.assert_array_equal(select(policy, q, q, q, np.zeros(40, bool)).budgets[:, 0], expected)
    equal = policies.PrefixKV(keep=0.3, profile=(0.7,), variant=variant)
    np.testing.assert_array_equal(select(equal, q, q, q, np.zeros(40, bool)).budgets[:, 0], [12, 12, 12])
    with pytest.raises(InputError, match="profile has 3 layers, the model has 4"):
        select(policy, *np.ones((3, 4, 2, 10, 8), np.float32), np.zeros(10, bool))


class Granted(policies.VLCache):
    """VL-Cache with the budgets of somebody else."""

    granted: tuple[int, ...] = ()

    def allocate(self, statistics, *, total, most, layers):
        return jnp.array(self.granted)


def test_vlcache(golden):
    g = golden("vlcache")
    layers, heads, length = g["q"].shape[:3]
    for i, ratio in enumerate(g["budget_ratios"].tolist()):
        # Given the paper's own budgets, the kept sets are the paper's.
        got = choose(Granted(keep=1.0, granted=tuple(g[f"paper_layer_budgets_{i}"].tolist())), g)
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


@pytest.mark.parametrize("variant", ["shared_window", "per_layer_window"])
def test_vlcache_as_others_have_written_it(golden, variant):
    g = golden("vlcache")
    for i, _ in pairs(g["budget_ratios"], [variant]):
        policy = policies.VLCache(keep=float(g["budget_ratios"][i]), variant=variant)
        got = choose(policy, g)
        np.testing.assert_allclose(got.extra["sparsity"], g["as_released_sparsity"], rtol=1e-5)
        fractions = policy.fractions(1 - got.extra["sparsity"])
        np.testing.assert_allclose(fractions, g[f"as_released_layer_budget_fractions_{variant}_{i}"], rtol=1e-5)
        np.testing.assert_array_equal(got.kept, g[f"as_released_kept_{variant}_{i}"])
    # A share that is clipped to 1 takes all tokens of its layer.
    policy = policies.VLCache(keep=0.95, variant=variant)
    got = choose(policy, g)
    whole = np.asarray(policy.fractions(1 - got.extra["sparsity"])) == 1
    assert variant == "shared_window" or (whole.any() and np.asarray(got.kept)[whole].all())
    # No density takes more than is allocated.
    random, length, policy = np.random.default_rng(0), 120, policies.VLCache(keep=0.3, variant=variant)
    windows = jnp.tile(jnp.maximum(1, jnp.arange(length + 1) // 10), (6, 1))
    given = {"windows": windows, "window": jnp.full(6, policy.shared_windows(np.array([length]))[0])}
    total = int(budget_of(policy, layers=6, most=length, text=length).total[length])
    assert total <= total_bound(policy, layers=6, vision=100, text=20)
    for power in (0, 1, 4, 16):
        sparsity = jnp.asarray(1 - random.random(6) ** power)
        assert allocate(policy, {**given, "sparsity": sparsity}, jnp.int32(total), jnp.full(6, length)).sum() <= total


@both_variants
def test_elastic_cache(golden, variant):
    """Padded on both sides. The published code keeps one token less, and merges others by mistake."""
    g, source = golden("elastic"), SOURCES[variant]
    q, k, v = (np.pad(g[name], [(0, 0), (0, 0), (3, 2), (0, 0)]) for name in "qkv")
    vision, valid = (np.pad(x, (3, 2)) for x in (g["is_vision"], np.ones_like(g["is_vision"])))
    sinks, recent = int(g["number_of_sink_tokens"]), int(g["number_of_recent_tokens"])
    for i in range(len(g["drop_ratios"])):
        asked, expected = int(g[f"paper_kept_{i}"][0].sum()), g[f"{source}_kept_{i}"]
        policy = policies.ElasticCache(budget=asked, sinks=sinks, recent=recent, variant=variant)
        *merged, got = compress(policy, q, k, v, vision, valid)
        assert (np.asarray(got.budgets) == asked - (variant == "released")).all()
        np.testing.assert_allclose(got.scores[:, 0][:, valid], g["layer_scores"], rtol=1e-5)
        same_in_every_head(got.kept[:, :, valid], expected)
        for layer, kept in enumerate(expected):
            for ours, name in zip(merged, ("key", "value"), strict=True):
                stored, wanted = np.asarray(ours)[layer][:, valid][:, kept], g[f"{source}_merged_{name}_{i}"][layer]
                np.testing.assert_allclose(stored, wanted, rtol=1e-5, atol=2e-5)


def look_m(g, ratio, prior, variant, way="none"):
    """LOOK-M with shares of heavy and recent tokens, and its cache."""
    heavy, recent = (int(share * g["q"].shape[1]) for share in g["ratio_pairs_heavy_recent"][ratio])
    policy = policies.LookM(
        budget=heavy + recent, recent=recent, text_prior=prior == "text_prior", merging=way, variant=variant
    )
    return policy, compress(policy, *layered(g, "q", "k", "v"), g["is_vision"])


@both_variants
def test_look_m(golden, variant):
    """The published code keeps all text, even over the budget; its way "pivot" is the paper's."""
    g, source = golden("lookm"), SOURCES[variant]
    vision = int(g["is_vision"].sum())
    for ratio, prior in pairs(g["ratio_pairs_heavy_recent"], PRIORS):
        policy, (*_, got) = look_m(g, ratio, PRIORS[prior], variant)
        np.testing.assert_array_equal(got.kept[0], g[f"{source}_kept_{PRIORS[prior]}_ratio{ratio}"])
        bound = total_bound(policy, layers=1, vision=vision, text=len(g["is_vision"]) - vision)
        assert got.kept[0].sum(axis=-1).max() <= bound
        if PRIORS[prior] == "plain":
            np.testing.assert_allclose(got.scores[0], g["column_sum_scores"], rtol=1e-5)
    ways = ("average", "weighted", "pivot")[: 3 if variant == "paper" else 2]
    for way, prior in pairs(ways, PRIORS):
        *merged, got = look_m(g, 0, PRIORS[prior], variant, ways[way])[1]
        for ours, name in zip(merged, ("key", "value"), strict=True):
            for head, kept in enumerate(np.asarray(got.kept[0])):
                expected = g[f"{source}_merged_{name}_{ways[way]}_{PRIORS[prior]}"][head]
                np.testing.assert_allclose(ours[0, head][kept], expected, atol=2e-5)


def csp(g, c, count, **options):
    window, n = int(g["recent_size"]), float(g.get("softmax_n", 1))
    return choose(
        policies.CSP(budget=int(g["selected_size"]) + window, window=window, c=c, score_n=n, **options), g, count
    )


both_windows = pytest.mark.parametrize("name", ["csp_text_window", "csp_mixed_window"])


@both_windows
def test_csp(golden, name):
    g = golden(name)
    kept, heads = (g["paper_kept_union"], g["paper_kept_without_duplicates"]), len(g["paper_self_scores"])
    for i, fill in pairs(g["cross_ratios"], kept):
        got = csp(g, float(g["cross_ratios"][i]), heads, heads="each", fill=bool(fill))
        for region in ("self", "cross"):
            expected = g[f"paper_{region}_scores"]
            np.testing.assert_allclose(got.extra[region][0, :, : expected.shape[1]], expected, rtol=1e-5)
        np.testing.assert_array_equal(got.kept[0], kept[fill][i])
        np.testing.assert_array_equal(got.budgets[0], kept[fill][i].sum(axis=-1))
    got = csp(g, "auto", heads, heads="each", fill=True)  # the share that cross attention has
    assert (np.sum(got.kept, axis=-1) == int(g["selected_size"] + g["recent_size"])).all()


@both_windows
def test_csp_as_released(golden, name):
    """Its two lists, each truncated by itself; a token of both is stored twice there and once here."""
    g = golden(name)
    window = int(g["recent_size"])
    for i, c in enumerate(g["cross_ratios"].tolist()):
        got = csp(g, c, g["as_released_kept"].shape[1], variant="released")
        np.testing.assert_array_equal(got.kept[0], g["as_released_kept"][i])
        lists = g["as_released_self_and_cross_counts"][i]
        np.testing.assert_array_equal(lists.sum() + window - got.budgets[0], g["as_released_duplicate_count"][i])
        for head, indices in enumerate(g["as_released_kept_indices_in_order"][i]):
            for region, part in zip(("self", "cross"), np.split(indices, np.cumsum(lists))[:2], strict=True):
                best = np.argsort(-np.asarray(got.extra[region])[0, head, :-window], kind="stable")
                np.testing.assert_array_equal(best[: len(part)], part)
