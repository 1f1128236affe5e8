"""variant="released" (or a re-implementation's name): what published code does otherwise than its paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from pallas_kernels import attention_mass
from tests import reference
from tests.models import tiny_llava, unequal_batch
from vlkv import policies
from vlkv.cache import pool_slots

select = jax.jit(policies.select)
compress = jax.jit(policies.compress)


def layered(g, *names):
    return tuple(g[name] if g[name].ndim == 4 else g[name][None] for name in names)


# --- CSP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["csp_text_window", "csp_mixed_window"])
@pytest.mark.parametrize("i", range(3))
def test_csp_keeps_what_the_released_code_keeps(golden, name, i):
    g = golden(name)
    window, chosen = int(g["recent_size"]), int(g["selected_size"])
    policy = policies.CSP(budget=window + chosen, window=window, c=float(g["cross_ratios"][i]), variant="released")
    got = select(policy, *layered(g, "q", "k", "k"), g["is_vision"])
    np.testing.assert_array_equal(got.kept[0], g["as_released_kept"][i])
    # Its two lists, each truncated by itself; a token of both is stored twice there and once here.
    lists = g["as_released_self_and_cross_counts"][i]
    np.testing.assert_array_equal(lists.sum() + window - got.budgets[0], g["as_released_duplicate_count"][i])
    for head, indices in enumerate(g["as_released_kept_indices_in_order"][i]):
        for name, part in zip(("self", "cross"), np.split(indices, np.cumsum(lists))[:2], strict=True):
            best = np.argsort(-np.asarray(got.extra[name])[0, head, : 800 - window], kind="stable")
            np.testing.assert_array_equal(best[: len(part)], part)


def test_csp_lists_are_truncated_apart(golden):
    g = golden("csp_text_window")
    counts = jnp.array([80, 80, 80, 80])
    for c, (own, cross) in zip(g["cross_ratios"], g["as_released_self_and_cross_counts"], strict=True):
        policy = policies.CSP(budget=120, c=float(c), variant="released")
        scores = np.zeros((4, 400), np.float32)
        both = {"self": scores.copy(), "cross": scores.copy()}
        both["self"][:, :200] = np.arange(200, 0, -1)
        both["cross"][:, 200:] = np.arange(200, 0, -1)
        order, taken = policy.rank(jnp.asarray(scores), jax.tree.map(jnp.asarray, both), jnp.ones(400, bool), counts)
        chosen = np.isinf(order)
        assert (chosen[:, :200].sum(axis=1) == own).all() and (chosen[:, 200:].sum(axis=1) == cross).all()
        assert (np.asarray(taken) == own + cross).all()


def test_csp_observes_with_the_last_tenth_of_the_prompt(golden):
    """As with `window=` that number; and it decodes with an ordinary softmax, as `decode_n=0` does."""
    g = golden("csp_mixed_window")
    valid = np.arange(800) >= 9  # 791 tokens: 79 rows
    free, fixed = (
        select(
            policies.CSP(budget=160, window=w, variant="released"), *layered(g, "q", "k", "k"), g["is_vision"], valid
        )
        for w in (None, 79)
    )
    np.testing.assert_array_equal(free.kept, fixed.kept)
    assert free.kept[0, :, -79:].all()
    assert policies.CSP(keep=0.2, variant="released").softmax_n == 0
    assert policies.CSP(keep=0.2, variant="released", decode_n=2).softmax_n == 2
    assert policies.CSP(keep=0.2).softmax_n == 1


def test_n_softmax_rows(golden):
    g = golden("csp_text_window")
    q, k = (jnp.asarray(g[name]) for name in ("q", "k"))
    rows = jnp.arange(797, 800)
    every = jnp.ones(800, bool)
    got = attention_mass(q[:, rows], k, row_weight=jnp.eye(3), key_mask=every, row_place=rows, softmax_n=1.0)
    np.testing.assert_allclose(got.swapaxes(0, 1), g["paper_softmax_n_last_rows"], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(got.swapaxes(0, 1), g["as_released_softmax_n_last_rows"], atol=2e-5)


# --- LOOK-M ---------------------------------------------------------------------------------------------------------


def look_m(g, ratio, prior, way="none"):
    heavy, recent = (int(624 * share) for share in g["ratio_pairs_heavy_recent"][ratio])
    policy = policies.LookM(
        budget=heavy + recent, recent=recent, text_prior=prior == "text_prior", merging=way, variant="released"
    )
    return policy, compress(policy, *layered(g, "q", "k", "v"), g["is_vision"])


@pytest.mark.parametrize("ratio", range(3))
@pytest.mark.parametrize("prior", ["plain", "text_prior"])
def test_look_m_keeps_all_text_even_over_the_budget(golden, ratio, prior):
    g = golden("lookm")
    policy, (_, _, got) = look_m(g, ratio, prior)
    np.testing.assert_array_equal(got.kept[0], g[f"as_released_kept_{prior}_ratio{ratio}"])
    vision = int(g["is_vision"].sum())
    bound = policy.bound(layers=1, vision=vision, text=624 - vision)
    assert got.kept[0].sum(axis=-1).max() <= bound
    if (prior, ratio) == ("text_prior", 2):
        assert policy.budget < got.kept[0, 0].sum() == 624 - vision


@pytest.mark.parametrize("prior", ["plain", "text_prior"])
@pytest.mark.parametrize("way", ["average", "weighted", "pivot"])
def test_look_m_merges_what_the_released_code_merges(golden, prior, way):
    g = golden("lookm")
    source = "paper" if way == "pivot" else "as_released"  # there they are the same
    k, v, got = look_m(g, 0, prior, way)[1]
    for head, kept in enumerate(np.asarray(got.kept[0])):
        np.testing.assert_allclose(k[0, head][kept], g[f"{source}_merged_key_{way}_{prior}"][head], atol=2e-5)
        np.testing.assert_allclose(v[0, head][kept], g[f"{source}_merged_value_{way}_{prior}"][head], atol=2e-5)


# --- PyramidKV ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", range(8))
def test_pyramidkv_hands_out_what_the_released_code_hands_out(golden, row):
    g = golden("pyramidkv")
    layers, capacity, window, length = (int(x) for x in g["budget_table_layers_capacity_window_length"][row])
    expected = g["as_released_tokens_kept_per_layer"][row, :layers]
    policy = policies.PyramidKV(budget=capacity, window=window, beta=int(g["beta"]), variant="released")
    counts = jnp.full(layers, length, jnp.int32)
    statistics = {"mean": jnp.minimum(capacity, counts), "count": counts}
    total = policy.total(counts, counts[0], layers=layers, most=length + 3)
    np.testing.assert_array_equal(policy.allocate(statistics, total=total, most=counts, layers=layers), expected)
    assert total == expected.sum() <= policy.bound(layers=layers, vision=length - 5, text=8)


def test_pyramidkv_keeps_what_the_released_code_keeps(golden):
    g = golden("pyramidkv")
    policy = policies.PyramidKV(
        budget=int(g["capacity"]), window=int(g["window_size"]), kernel=int(g["kernel_size"]), pooling="avg",
        beta=int(g["beta"]), variant="released",
    )  # fmt: skip
    q, k = (np.broadcast_to(g[name], (int(g["number_of_layers"]), *g[name].shape)) for name in ("q", "k"))
    np.testing.assert_array_equal(select(policy, q, k, k, g["is_vision"]).kept, g["as_released_kept"])


# --- VL-Cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["shared_window", "per_layer_window"])
@pytest.mark.parametrize("i", range(2))
def test_vlcache_as_others_have_written_it(golden, variant, i):
    g = golden("vlcache")
    policy = policies.VLCache(keep=float(g["budget_ratios"][i]), variant=variant)
    got = select(policy, g["q"], g["k"], g["k"], g["is_vision"])
    np.testing.assert_allclose(got.extra["sparsity"], g["as_released_sparsity"], rtol=1e-5)
    fractions = policy.fractions(1 - got.extra["sparsity"])
    np.testing.assert_allclose(fractions, g[f"as_released_layer_budget_fractions_{variant}_{i}"], rtol=1e-5)
    np.testing.assert_array_equal(got.kept, g[f"as_released_kept_{variant}_{i}"])


def test_vlcache_importance_per_query_head(golden):
    g = golden("vlcache")
    k = np.repeat(g["k"], 2, axis=1)
    got = select(policies.VLCache(keep=0.1, variant="shared_window"), g["q"], k, k, g["is_vision"])
    np.testing.assert_allclose(got.scores, g["as_released_token_importance_per_query_head"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", ["shared_window", "per_layer_window"])
def test_vlcache_largest_is_reached_by_no_density(variant):
    policy = policies.VLCache(keep=0.3, variant=variant)
    random = np.random.default_rng(0)
    length = 120
    windows = jnp.maximum(1, jnp.arange(length + 1) // 10)
    statistics = {"windows": jnp.tile(windows, (6, 1)), "window": jnp.full(6, policy.shared_windows(length)[-1])}
    most = jnp.full(6, length)
    for power in (0, 1, 4, 16):
        density = random.random(6) ** power
        total = policy.total(most, most[0], layers=6, most=length)
        sparsity = jnp.asarray(1 - density)
        got = policy.allocate({**statistics, "sparsity": sparsity}, total=total, most=most, layers=6)
        assert got.sum() <= total <= policy.bound(layers=6, vision=100, text=20)


# --- StreamingLLM, and all of them in a model -----------------------------------------------------------------------


def test_streaming_llm_keeps_the_rotation_of_the_prompt(golden):
    """Its own keys come back, where the authors rotate them to their places in the cache."""
    g = golden("streaming_h2o")
    k, _, got = compress(policies.StreamingLLM(budget=20), *layered(g, "q", "k", "k"), g["is_vision"])
    np.testing.assert_array_equal(k[0][got.kept[0]], g["k"][got.kept[0]])


RELEASED = [
    policies.CSP(keep=0.4, variant="released"),
    policies.LookM(keep=0.2, variant="released", merging="average"),
    policies.LookM(keep=0.2, variant="released", scope="vision", merging="weighted"),
    policies.PyramidKV(keep=0.4, window=3, variant="released"),
    policies.PyramidKV(keep=0.3, scope="vision", variant="released"),
    policies.VLCache(keep=0.3, variant="shared_window"),
    policies.VLCache(keep=0.3, variant="per_layer_window"),
]
prefill = jax.jit(vlkv.prefill, static_argnames="new_tokens")


@pytest.fixture(scope="module")
def params():
    return tiny_llava()


@pytest.mark.default("PyramidKV(keep=0.4")
@pytest.mark.parametrize("policy", RELEASED, ids=repr)
def test_the_pool_has_room_and_holds_what_select_names(params, policy):
    """Prompts of two images, one and none, padded on the left: the pool against a float64 run's q and k."""
    batch = unequal_batch(padding="left")
    cache, _ = prefill(params, batch, policy, new_tokens=2)
    slots = pool_slots(policy, layers=3, vision=batch.max_vision, text=batch.max_text, new_tokens=0, images=2)
    assert cache.token.shape[1] == slots
    x = np.asarray(params.embed(jax.tree.map(jnp.asarray, batch)))
    for row, valid in enumerate(batch.valid):
        _, layers = reference.prefill(params.decoder, x[row, valid])
        q, k, v = (np.zeros((3, heads, len(valid), 8), np.float32) for heads in (4, 2, 2))
        for whole, i in ((q, 0), (k, 1), (v, 2)):
            whole[:, :, valid] = np.stack([layer[i].swapaxes(0, 1) for layer in layers])
        wanted = np.asarray(select(policy, q, k, v, batch.is_vision[row], valid).kept)
        for layer, head in np.ndindex(3, 2):
            start, length = (int(x[layer, row, head]) for x in (cache.start, cache.length))
            held = np.sort(np.asarray(cache.token)[row, start : start + length, head])
            np.testing.assert_array_equal(held, np.flatnonzero(wanted[layer, head]))


@pytest.mark.parametrize(
    ("cls", "options", "name"),
    [
        (policies.CSP, {"variant": "released", "fill": True}, "fill"),
        (policies.CSP, {"decode_n": -1.0}, "decode_n"),
        (policies.PyramidKV, {"variant": "released", "cap": 1.5}, "cap"),
        (policies.VLCache, {"variant": "shared_window", "scope": "vision"}, "variant"),
    ],
)
def test_bad_options_are_named(cls, options, name):
    with pytest.raises(vlkv.InputError, match=f"{cls.__name__}: {name}="):
        cls(keep=0.3, **options)
