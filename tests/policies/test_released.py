"""variant="released" (or a re-implementation's name): what published code does otherwise than its paper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention_mass
from tests.policies.golden_vectors import choose, compress, layered, look_m, look_m_merges
from vlkv import policies
from vlkv.compression import sizes
from vlkv.compression.sizes import total_bound

# --- CSP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["csp_text_window", "csp_mixed_window"])
def test_csp_keeps_what_the_released_code_keeps(golden, name):
    g = golden(name)
    window, chosen = int(g["recent_size"]), int(g["selected_size"])
    for i, c in enumerate(g["cross_ratios"].tolist()):
        policy = policies.CSP(
            budget=window + chosen, window=window, c=c, score_n=float(g.get("softmax_n", 1)), variant="released"
        )
        got = choose(policy, g, g["as_released_kept"].shape[1])
        np.testing.assert_array_equal(got.kept[0], g["as_released_kept"][i])
        # Its two lists, each truncated by itself; a token of both is stored twice there and once here.
        lists = g["as_released_self_and_cross_counts"][i]
        np.testing.assert_array_equal(lists.sum() + window - got.budgets[0], g["as_released_duplicate_count"][i])
        for head, indices in enumerate(g["as_released_kept_indices_in_order"][i]):
            for region, part in zip(("self", "cross"), np.split(indices, np.cumsum(lists))[:2], strict=True):
                best = np.argsort(-np.asarray(got.extra[region])[0, head, :-window], kind="stable")
                np.testing.assert_array_equal(best[: len(part)], part)


def test_csp_lists_are_truncated_apart(golden):
    g = golden("csp_text_window")
    count = int(g["selected_size"])
    falling = np.arange(count, 0, -1, dtype=np.float32)
    one, other = np.r_[falling, 0 * falling], np.r_[0 * falling, falling]
    both = {"self": jnp.asarray(one)[None], "cross": jnp.asarray(other)[None]}
    everything = jnp.ones(2 * count, bool)
    for c, (own, cross) in zip(g["cross_ratios"], g["as_released_self_and_cross_counts"], strict=True):
        policy = policies.CSP(budget=2 * count, c=float(c), variant="released")
        order, taken = jax.jit(policy.rank)(jnp.zeros((1, 2 * count)), both, everything, jnp.array([count]))
        chosen = np.isinf(order[0])
        assert chosen[:count].sum() == own and chosen[count:].sum() == cross and taken[0] == own + cross


def test_n_softmax_rows(golden):
    g = golden("csp_text_window")
    q, k = (jnp.asarray(g[name]) for name in ("q", "k"))
    length, rows = q.shape[1], g["paper_softmax_n_last_rows"].shape[1]
    places = jnp.arange(length - rows, length)
    mass = jax.jit(functools.partial(attention_mass, softmax_n=float(g.get("softmax_n", 1))))
    got = mass(q[:, places], k, row_weight=jnp.eye(rows), key_mask=jnp.ones(length, bool), row_place=places).swapaxes(
        0, 1
    )
    np.testing.assert_allclose(got, g["paper_softmax_n_last_rows"], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(got, g["as_released_softmax_n_last_rows"], atol=2e-5)


# --- LOOK-M ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["text_prior", pytest.param("plain", marks=pytest.mark.full)])
@pytest.mark.full
def test_look_m_keeps_all_text_even_over_the_budget(golden, prior):
    g = golden("lookm")
    vision = int(g["is_vision"].sum())
    for ratio in range(len(g["ratio_pairs_heavy_recent"])):
        policy, (_, _, got) = look_m(g, ratio, prior, variant="released")
        np.testing.assert_array_equal(got.kept[0], g[f"as_released_kept_{prior}_ratio{ratio}"])
        bound = total_bound(policy, layers=1, vision=vision, text=len(g["is_vision"]) - vision)
        assert got.kept[0].sum(axis=-1).max() <= bound


def test_look_m_merges_what_the_released_code_merges(golden, pairs):
    g = golden("lookm")
    ways, priors = ("average", "weighted"), ("plain", "text_prior")  # the released "pivot" is the paper's
    for way, prior in pairs(ways, priors):
        look_m_merges(g, "as_released", ways[way], priors[prior], variant="released")


# --- PyramidKV ------------------------------------------------------------------------------------------------------


def test_pyramidkv_hands_out_what_the_released_code_hands_out(golden):
    g = golden("pyramidkv")
    rows = g["budget_table_layers_capacity_window_length"].tolist()
    longest = max(length for *_, length in rows)

    @jax.jit
    def hand_out(policy, mean, counts):
        total = jnp.asarray(sizes.budget_of(policy, layers=len(counts), most=longest, text=longest).total)[counts[0]]
        statistics = {"mean": mean, "count": counts}
        return total, policy.allocate(statistics, total=total, most=counts, layers=len(counts))

    for (layers, capacity, window, length), expected in zip(rows, g["as_released_tokens_kept_per_layer"], strict=True):
        policy = policies.PyramidKV(budget=capacity, window=window, beta=int(g["beta"]), variant="released")
        counts = jnp.full(layers, length, jnp.int32)
        total, got = hand_out(policy, jnp.minimum(capacity, counts), counts)
        np.testing.assert_array_equal(got, expected[:layers])
        assert total == expected[:layers].sum()


def test_pyramidkv_keeps_what_the_released_code_keeps(golden):
    g = golden("pyramidkv")
    policy = policies.PyramidKV(
        budget=int(g["capacity"]), window=int(g["window_size"]), kernel=int(g["kernel_size"]), pooling="avg",
        beta=int(g["beta"]), variant="released",
    )  # fmt: skip
    layers, heads, _ = g["as_released_kept"].shape
    every = {**g, **{name: np.broadcast_to(g[name], (layers, *g[name].shape)) for name in ("q", "k")}}
    np.testing.assert_array_equal(choose(policy, every, heads).kept, g["as_released_kept"])


# --- VL-Cache -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_vlcache_as_others_have_written_it(golden, pairs):
    g = golden("vlcache")
    variants = ("shared_window", "per_layer_window")
    for i, j in pairs(g["budget_ratios"], variants):
        variant = variants[j]
        policy = policies.VLCache(keep=float(g["budget_ratios"][i]), variant=variant)
        got = choose(policy, g)
        np.testing.assert_allclose(got.extra["sparsity"], g["as_released_sparsity"], rtol=1e-5)
        fractions = policy.fractions(1 - got.extra["sparsity"])
        np.testing.assert_allclose(fractions, g[f"as_released_layer_budget_fractions_{variant}_{i}"], rtol=1e-5)
        np.testing.assert_array_equal(got.kept, g[f"as_released_kept_{variant}_{i}"])


@pytest.mark.full  # the sums of a group are checked per key head
def test_vlcache_importance_per_query_head(golden):
    g = golden("vlcache")
    expected = g["as_released_token_importance_per_query_head"]
    got = choose(policies.VLCache(keep=0.1, variant="shared_window"), g, expected.shape[1])
    np.testing.assert_allclose(got.scores, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", ["shared_window", "per_layer_window"])
def test_vlcache_largest_is_reached_by_no_density(variant):
    policy = policies.VLCache(keep=0.3, variant=variant)
    random = np.random.default_rng(0)
    length = 120
    windows = jnp.maximum(1, jnp.arange(length + 1) // 10)
    statistics = {
        "windows": jnp.tile(windows, (6, 1)),
        "window": jnp.full(6, policy.shared_windows(np.array([length]))[0]),
    }
    most = jnp.full(6, length)
    for power in (0, 1, 4, 16):
        density = random.random(6) ** power
        total = jnp.asarray(sizes.budget_of(policy, layers=6, most=length, text=length).total)[length]
        sparsity = jnp.asarray(1 - density)
        got = policy.allocate({**statistics, "sparsity": sparsity}, total=total, most=most, layers=6)
        assert got.sum() <= total <= total_bound(policy, layers=6, vision=100, text=20)


# --- StreamingLLM, and all of them in a model -----------------------------------------------------------------------


def test_streaming_llm_keeps_the_rotation_of_the_prompt(golden):
    """Its own keys come back, where the authors rotate them to their places in the cache."""
    g = golden("streaming_h2o")
    k, _, got = compress(policies.StreamingLLM(budget=20), *layered(g, "q", "k", "k"), g["is_vision"])
    np.testing.assert_array_equal(k[0][got.kept[0]], g["k"][got.kept[0]])
