"""Policies against golden vectors of the papers' equations and of published code (see tests/golden/README.md)."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import vlkv
from tests import programs
from tests.golden import kvpress_logits as golden
from tests.policies import numpy_policies as reference
from tests.policies.arrays import by_parts
from vlkv import InputError, analysis, policies
from vlkv.compression.sizes import budget_of, total_bound


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


def test_pyramidkv(golden):
    """Its kept tokens, and its budgets for other sizes."""
    g = golden("pyramidkv")
    layers, heads, _ = g["as_released_kept"].shape
    every = {**g, **{name: np.broadcast_to(g[name], (layers, *g[name].shape)) for name in ("q", "k")}}
    policy = policies.PyramidKV(
        budget=int(g["capacity"]), window=int(g["window_size"]), kernel=int(g["kernel_size"]), pooling="avg",
        beta=int(g["beta"]), variant="released",
    )  # fmt: skip
    np.testing.assert_array_equal(choose(policy, every, heads).kept, g["as_released_kept"])
    rows = g["budget_table_layers_capacity_window_length"].tolist()
    for (layers, capacity, window, length), expected in zip(rows, g["as_released_tokens_kept_per_layer"], strict=True):
        policy = dataclasses.replace(policy, budget=capacity, window=window)
        bounds, most = budget_of(policy, layers=layers, most=length, text=length), jnp.full(layers, length, jnp.int32)
        statistics = {"mean": jnp.minimum(capacity, most), "count": most}
        got = np.asarray(allocate(policy, statistics, jnp.int32(bounds.nominal[-1]), most))
        np.testing.assert_array_equal(got, expected[:layers])
        assert bounds.total[length] == got.sum()


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


def test_prefixkv(golden):
    g = golden("prefixkv")
    for r, s in pairs(g["keep_ratios"], g["number_of_sink_tokens"]):
        sinks, recent = int(g["number_of_sink_tokens"][s]), int(g["number_of_recent_tokens"])
        policy = policies.PrefixKV(keep=float(g["keep_ratios"][r]), sinks=sinks, recent=recent, variant="released")
        got = choose(policy, g)
        same_in_every_head(got.budgets, g["as_released_budgets"][r, s])
        same_in_every_head(got.kept, g["as_released_kept"][r, s])


@pytest.mark.parametrize("variant", ["paper", "released"])
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
    # No density takes more than is allocated.
    random, length, policy = np.random.default_rng(0), 120, policies.VLCache(keep=0.3, variant=variant)
    windows = jnp.tile(jnp.maximum(1, jnp.arange(length + 1) // 10), (6, 1))
    given = {"windows": windows, "window": jnp.full(6, policy.shared_windows(np.array([length]))[0])}
    total = int(budget_of(policy, layers=6, most=length, text=length).total[length])
    assert total <= total_bound(policy, layers=6, vision=100, text=20)
    for power in (0, 1, 4, 16):
        sparsity = jnp.asarray(1 - random.random(6) ** power)
        assert allocate(policy, {**given, "sparsity": sparsity}, jnp.int32(total), jnp.full(6, length)).sum() <= total


def test_elastic_cache(golden):
    """Padded on both sides. The published code keeps one token less, and merges others by mistake."""
    g = golden("elastic")
    q, k, v = (np.pad(g[name], [(0, 0), (0, 0), (3, 2), (0, 0)]) for name in "qkv")
    vision, valid = (np.pad(x, (3, 2)) for x in (g["is_vision"], np.ones_like(g["is_vision"])))
    sinks, recent = int(g["number_of_sink_tokens"]), int(g["number_of_recent_tokens"])
    for i in range(len(g["drop_ratios"])):
        asked, expected = int(g[f"paper_kept_{i}"][0].sum()), g[f"as_released_kept_{i}"]
        policy = policies.ElasticCache(budget=asked, sinks=sinks, recent=recent, variant="released")
        *merged, got = compress(policy, q, k, v, vision, valid)
        assert (np.asarray(got.budgets) == asked - 1).all()
        same_in_every_head(got.kept[:, :, valid], expected)
        for layer, kept in enumerate(expected):
            for ours, name in zip(merged, ("key", "value"), strict=True):
                stored, wanted = np.asarray(ours)[layer][:, valid][:, kept], g[f"as_released_merged_{name}_{i}"][layer]
                np.testing.assert_allclose(stored, wanted, rtol=1e-5, atol=2e-5)


def look_m(g, ratio, prior, way="none"):
    """The published LOOK-M with shares of heavy and recent tokens, and its cache."""
    heavy, recent = (int(share * g["q"].shape[1]) for share in g["ratio_pairs_heavy_recent"][ratio])
    options = dict(budget=heavy + recent, recent=recent, text_prior=prior == "text_prior", merging=way)
    policy = policies.LookM(**options, variant="released")
    return policy, compress(policy, *layered(g, "q", "k", "v"), g["is_vision"])


def test_look_m(golden):
    """The published code keeps all text, even over the budget; its way "pivot" is the paper's."""
    g, priors = golden("lookm"), ("plain", "text_prior")
    vision = int(g["is_vision"].sum())
    for ratio, prior in pairs(g["ratio_pairs_heavy_recent"], priors):
        policy, (*_, got) = look_m(g, ratio, priors[prior])
        np.testing.assert_array_equal(got.kept[0], g[f"as_released_kept_{priors[prior]}_ratio{ratio}"])
        bound = total_bound(policy, layers=1, vision=vision, text=len(g["is_vision"]) - vision)
        assert got.kept[0].sum(axis=-1).max() <= bound
    for way, prior in zip(("average", "weighted"), priors, strict=True):
        *merged, got = look_m(g, 0, prior, way)[1]
        for ours, name in zip(merged, ("key", "value"), strict=True):
            for head, kept in enumerate(np.asarray(got.kept[0])):
                expected = g[f"as_released_merged_{name}_{way}_{prior}"][head]
                np.testing.assert_allclose(ours[0, head][kept], expected, atol=2e-5)


def csp(g, c, count, **options):
    window, n = int(g["recent_size"]), float(g.get("softmax_n", 1))
    return choose(
        policies.CSP(budget=int(g["selected_size"]) + window, window=window, c=c, score_n=n, **options), g, count
    )


both_windows = pytest.mark.parametrize("name", ["csp_text_window", "csp_mixed_window"])


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


select, compress = by_parts()(policies.select), by_parts()(policies.compress)
allocate = jax.jit(
    lambda policy, statistics, total, most: policy.allocate(statistics, total=total, most=most, layers=len(most))
)


def layered(g, *names):
    """Arrays with a leading axis L, which is added if the file has only one layer."""
    return tuple(g[name] if g[name].ndim == 4 else g[name][None] for name in names)


def choose(policy, g, heads=None):
    """The selection of a policy. `heads`: repeats the key heads up to this number."""
    q, k = layered(g, "q", "k")
    k = np.repeat(k, (heads or k.shape[1]) // k.shape[1], axis=1)
    return select(policy, q, k, k, g["is_vision"])


def pairs(first, second) -> list[tuple[int, int]]:
    """Pairs of indices into two lists, each index at least once: a failure rarely depends on both."""
    a, b = len(first), len(second)
    return [(i % a, i % b) for i in range(max(a, b))]


def same_in_every_head(got, expected):
    """Asserts that `got` [L, K, ...] is `expected` [L, ...] in every head."""
    got, expected = np.asarray(got), np.asarray(expected)
    np.testing.assert_array_equal(got, np.broadcast_to(expected[:, None], got.shape))


def same_rows(got, want):
    """Asserts that two lists of vectors are equal up to their order."""
    got, want = np.asarray(got), np.asarray(want)
    nearest = abs(got[:, None] - want).max(axis=-1).argmin(axis=1)
    np.testing.assert_array_equal(np.sort(nearest), np.arange(len(want)))
    np.testing.assert_allclose(got, want[nearest], atol=2e-5)


SAME = {"budget": golden.KEPT, "scope": "all"}
WINDOW = {"window": 8, "kernel": 5, "pooling": "avg"}
METHODS = {
    "snapkv": policies.SnapKV(**SAME, **WINDOW),
    # kvpress' beta is 4, because its budgets contain the window: 48 / 4 = (48 - 6) / 7 + 6.
    "pyramidkv": policies.PyramidKV(**SAME, **WINDOW | {"window": 6}, beta=7),
    "streamingllm": policies.StreamingLLM(**SAME),
    "tova": policies.TOVA(**SAME, recent=1, evict=False),
    "knorm": policies.Knorm(**SAME),
    "keydiff": policies.KeyDiff(**SAME),
    "observed": policies.RoCo(**SAME, recent=0, spread=0.0, evict=False),  # the mean attention of the later rows
    "adakv": policies.AdaKV(**SAME, **WINDOW, safeguard=0.0),
    "expectedattention": policies.ExpectedAttention(**SAME, ahead=64),
    "criticalkv": policies.CriticalKV(**SAME, **WINDOW),
    "kvzip": policies.KVzip(**SAME, instruction=golden.INSTRUCTION),
}


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(golden.CONFIG))
    save_file(golden.weights(), folder / "model.safetensors")
    return vlkv.load_params(folder, dtype="float32")


@pytest.mark.default("criticalkv")
@pytest.mark.ci("expectedattention", "criticalkv")
@pytest.mark.parametrize("name", METHODS)
def test_logits_are_those_of_the_press(params, name):
    found, ids = np.load(golden.FILE), golden.tokens()
    prompt = {"input_ids": ids[None, : golden.PROMPT], "attention_mask": np.ones((1, golden.PROMPT), int)}
    inputs = vlkv.Inputs.from_hf(prompt, params.config)
    cache, _ = programs.prefill(params, inputs, METHODS[name], new_tokens=golden.NEW)
    step, logits = programs.decode_step, []
    for token in ids[golden.PROMPT :]:
        cache, out = step(params, cache, np.array([token]))
        logits.append(out[0])
    np.testing.assert_allclose(np.array(logits), found[name], atol=1e-4)
    if name not in ("adakv", "kvzip"):  # kvpress masks what it evicts
        np.testing.assert_array_equal(np.asarray(cache.counts)[:, 0, 0], found[f"{name}_entries"])


def test_scores_of_kvzip_are_those_of_the_press(params):
    """Those of the sinks are set to the largest one later, so they are not compared."""
    prompt = {"input_ids": golden.tokens()[None, : golden.PROMPT]}
    policy = METHODS["kvzip"]
    read = programs.read_prompt(params, vlkv.Inputs.from_hf(prompt, params.config), policy)
    scores = jax.jit(analysis.choose)(read, policy).scores[0, ..., policy.sinks : golden.PROMPT]
    np.testing.assert_allclose(scores, np.load(golden.FILE)["kvzip_scores"][..., policy.sinks :], rtol=1e-4, atol=1e-5)
