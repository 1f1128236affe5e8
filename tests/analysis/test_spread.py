"""Lorenz curves, Gini, divergence and agreement of rankings, on numbers small enough to check by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from vlkv import analysis
from vlkv.analysis import cost
from vlkv.config import DecoderConfig, ExpertsConfig, RecurrentConfig
from vlkv.families.internvl import InternVitConfig
from vlkv.towers.vit import ClipConfig, SiglipConfig

INSIDE = np.array([True, True, False, True, True])  # one token is padding
lorenz, gini, retained = jax.jit(analysis.lorenz), jax.jit(analysis.gini), jax.jit(analysis.retained)


def test_lorenz_gini_and_what_a_budget_retains():
    importance = np.array([[1.0, 4.0, 9.0, 2.0, 3.0], [5.0, 5.0, 1.0, 5.0, 5.0], [0.0, 7.0, 2.0, 0.0, 0.0], [0.0] * 5])
    curve = lorenz(importance.astype(np.float32), INSIDE)
    np.testing.assert_allclose(
        curve, [[0.4, 0.7, 0.9, 1, 1], [0.25, 0.5, 0.75, 1, 1], [1, 1, 1, 1, 1], [0.25, 0.5, 0.75, 1, 1]], rtol=1e-6
    )
    # Trapezoids by hand, layer 0: (0.2 + 0.55 + 0.8 + 0.95) / 4 = 0.625; twice what lies above 1/2: 0.25.
    np.testing.assert_allclose(gini(importance.astype(np.float32), INSIDE), [0.25, 0, 0.75, 0], atol=1e-6)
    np.testing.assert_allclose(retained(curve, np.array([2, 1, 0, 4])), [0.7, 0.25, 0, 1], rtol=1e-6)
    assert gini(np.ones((4, 5), np.float32), np.zeros(5, bool)).tolist() == [0] * 4


def test_jensen_shannon():
    p = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0], [1.0, 0.0, 0.0], [3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    q = np.array([[5.0, 5.0, 0.0], [0.0, 0.0, 9.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    middle = np.array([0.625, 0.375])
    by_hand = sum((np.array(x) * np.log2(np.array(x) / middle)).sum() / 2 for x in ([0.75, 0.25], [0.5, 0.5]))
    got = analysis.jensen_shannon(p, q)
    np.testing.assert_allclose(got, [0, 1, 1, by_hand, np.nan], atol=1e-6)


def test_histograms_of_values():
    a, b = np.array([[[0.0, 1.0, 99.0, 2.0, 4.0]], [[3.9, 4.0, 0.5, 1.1, 0.2]]], np.float32)
    counts = analysis.value_histograms(a, b, INSIDE, bins=4)
    np.testing.assert_array_equal(counts, [[[1, 1, 1, 1]], [[1, 1, 0, 2]]])
    np.testing.assert_array_equal(analysis.value_histograms(0 * a, 0 * b, INSIDE, bins=4)[0], [[4, 0, 0, 0]])


@pytest.mark.parametrize("fraction, shared", [(0.5, 0.5), (0.25, 1.0), (0.01, 1.0)])
def test_concordance(fraction, shared):
    """The best of a: 1, 0 (a tie with 4, the earlier wins), 4, 3; of b: 1, 4, 3, 0."""
    a, b = np.array([[3.0, 5.0, 9.0, 1.0, 3.0], [0.1, 0.9, 0.9, 0.2, 0.3]], np.float32)
    concordance = jax.jit(analysis.concordance, static_argnums=3)
    assert concordance(a, b, INSIDE, fraction) == shared
    assert np.isnan(concordance(a, b, np.zeros(5, bool), fraction))


def test_token_types_and_their_shares():
    is_vision = np.array([[0, 0, 1, 1, 0, 1, 0, 0], [0] * 8, [0, 1, 1, 0, 0, 0, 0, 0]], bool)
    valid = np.array([[0, 1, 1, 1, 1, 1, 1, 1], [1] * 6 + [0] * 2, [1] * 8], bool)
    types = analysis.token_types(is_vision, valid)
    np.testing.assert_array_equal(
        types, [[-1, 0, 1, 1, 2, 1, 2, 2], [2, 2, 2, 2, 2, 2, -1, -1], [0, 1, 1, 2, 2, 2, 2, 2]]
    )
    mass = np.broadcast_to(np.arange(10, dtype=np.float32), (1, 2, 3, 10))
    shares = jax.jit(analysis.shares_by_type)(mass, types)
    np.testing.assert_array_equal(shares[0, 1], [[1, 10, 17, 17], [0, 0, 15, 17], [0, 3, 25, 17]])


def test_density_by_hand():
    """Two values at 0 and 2: deviation 1, bandwidth 2^(-1/5); and a single value gets the distance of the points."""
    x, width = np.array([0.0, 0.5, 1.0, 2.0]), 2**-0.2
    heights = [(np.exp(-((at / width) ** 2) / 2) + np.exp(-(((2 - at) / width) ** 2) / 2)) / 2 for at in x]
    np.testing.assert_allclose(analysis.density(np.array([0.0, 2.0]), x), heights / (width * np.sqrt(2 * np.pi)))
    assert analysis.density(np.array([1.0]), x)[2] == pytest.approx(2 / np.sqrt(2 * np.pi))
    assert not analysis.density(np.array([]), x).any()


def test_consistency_by_hand():
    """Cosines 1, 0 and 0 between three observers."""
    assert analysis.consistency(np.array([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]])) == pytest.approx(1 / 3)
    assert np.isnan(analysis.consistency(np.ones((1, 4))))


@pytest.mark.full
def test_what_an_observer_sees():
    """Against softmax in float64: two query heads share a key head, a later token is not seen, nor is padding."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((5, 2, 4)), rng.standard_normal((5, 1, 4))
    valid = np.array([True, True, True, True, False])
    x = (jnp.asarray(x, jnp.float32) for x in (q, k))
    got = analysis.observer_attention(*x, jnp.asarray(valid), [1, 3], [0, 2])
    for row, place in enumerate((1, 3)):
        weight = np.exp(q[place] @ k[:, 0].T / 2)[:, : place + 1]  # heads, keys up to the observer
        share = np.zeros((2, 5))
        share[:, : place + 1] = weight / weight.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(got[row], share.mean(axis=0)[[0, 2]], atol=1e-6)


def test_by_hand():
    """One layer of width 2, MLP width 3, 2 heads of 4 channels over 1 key head."""
    c = DecoderConfig(
        vocab_size=10, width=2, mlp_width=3, layers=2, heads=2, kv_heads=1, head_dim=4, norm_eps=1e-5,
        max_positions=64,
    )  # fmt: skip
    weights = 2 * 2 * 8 + 2 * 2 * 4 + 3 * 2 * 3  # queries and output, keys and values, MLP
    scores_and_sums = 2 * 8  # per pair of tokens
    np.testing.assert_array_equal(
        analysis.prefill_flops(c, np.array([5, 3])),
        [2 * (5 * weights + 25 * scores_and_sums), 2 * (3 * weights + 9 * scores_and_sums)],
    )
    np.testing.assert_array_equal(
        analysis.decode_flops(c, np.array([6, 1])), [2 * (weights + 6 * scores_and_sums), 2 * (weights + 16)]
    )
    assert analysis.logits_flops(c, 3) == 2 * 3 * 2 * 10
    np.testing.assert_array_equal(analysis.cache_bytes(c, np.array([7, 0]), 2), [2 * 7 * 4 * 2, 0])


def test_recurrent_layers_by_hand():
    """A recurrent layer with a shared expert, then gated attention, of width 2; operations do not grow with pairs."""
    c = DecoderConfig(
        vocab_size=10, width=2, mlp_width=3, layers=2, heads=2, kv_heads=1, head_dim=4, norm_eps=1e-5,
        max_positions=64, gated=True,
        recurrent=RecurrentConfig(layers=(0,), key_heads=1, heads=2, key_dim=3, value_dim=5, taps=4),
        experts=ExpertsConfig(layers=(0,), count=4, active=2, width=3, normalised=True, shared=6),
    )  # fmt: skip
    qkv_gate_out, rates, memory = 2 * (2 * 3 + 3 * 2 * 5), 2 * 2 * 2, 3 * 2 * 3 * 5
    router, experts, shared = 2 * 4, 2 * 3 * 2 * 3, 3 * 2 * 6 + 2
    first = 2 * (qkv_gate_out + rates + memory + router + experts + shared)
    second = 2 * (3 * 2 * 8 + 2 * 2 * 4 + 3 * 2 * 3)
    np.testing.assert_array_equal(analysis.prefill_flops(c, np.array([5, 5])), [5 * first, 5 * second + 4 * 25 * 8])
    np.testing.assert_array_equal(analysis.decode_flops(c, np.array([9, 9])), [first, second + 4 * 9 * 8])
    only = cost.full_attention(c)
    np.testing.assert_array_equal(analysis.prefill_flops(only, np.array([5])), [5 * second + 4 * 25 * 8])
    assert cost.state_bytes(c, 2) == 4 * 2 * 3 * 5 + 2 * 3 * (2 * 3 + 2 * 5)


def test_towers_by_hand():
    """Four patches of 2 x 2 pixels, one block of width 2 and MLP width 3, to a decoder of width 5; two pictures."""
    sizes = dict(width=2, mlp_width=3, layers=1, heads=1, image_size=4, patch_size=2, norm_eps=1e-6, feature_layer=-1)

    def by_hand(tokens: int, projected: int, merged: int) -> int:
        weights = tokens * (4 * 2 * 2 + 2 * 2 * 3)
        embedded = 4 * (3 * 2 * 2) * 2
        return 2 * 2 * (embedded + weights + 2 * tokens**2 * 2 + projected * (merged * 5 + 5 * 5))

    assert analysis.tower_flops(SiglipConfig(**sizes), 5, 2) == by_hand(4, 4, 2)
    clip = ClipConfig(**sizes, keep_class_token=True)
    assert analysis.tower_flops(clip, 5, 2) == by_hand(5, 5, 2)
    intern = InternVitConfig(**sizes, norm="layer_norm", qkv_bias=True)
    assert analysis.tower_flops(intern, 5, 2, merge=2) == by_hand(5, 1, 8)


@pytest.mark.parametrize("name, tower", [("qwen2-vl-2b", "NativeConfig"), ("vicuna-1.5-7b", "NoneType")])
def test_a_tower_that_is_not_counted(name, tower):
    with pytest.raises(vlkv.InputError, match=rf"one size \(ClipConfig, .*, not {tower}; count the decoder alone"):
        analysis.tower_flops(vlkv.presets[name].vision, 1536)


@pytest.mark.parametrize(
    "layers, width, mlp_width, heads, images, flops, memory",
    [(40, 5120, 13824, 40, 1, 19.4, 0.55), (32, 4096, 11008, 32, 1, 10.2, 0.35),
     (40, 5120, 13824, 40, 5, 65.0, 1.75), (32, 4096, 11008, 32, 5, 34.8, 1.12)],
    ids=["1.5-13B", "1.5-7B", "NeXT-13B", "NeXT-7B"],
)  # fmt: skip
def test_full_caches_of_lightkv_table_1(layers, width, mlp_width, heads, images, flops, memory):
    """Tera-operations to the last of 100 new tokens (Sec. 4.2) after 48 of text (not said), and the cache in GiB."""
    c = DecoderConfig(
        vocab_size=32000, width=width, mlp_width=mlp_width, layers=layers, heads=heads, kv_heads=heads, head_dim=128,
        norm_eps=1e-5, max_positions=4096,
    )  # fmt: skip
    clip = ClipConfig(
        width=1024, mlp_width=4096, layers=24, heads=16, image_size=336, patch_size=14, norm_eps=1e-5,
        feature_layer=-2, keep_class_token=False,
    )  # fmt: skip
    prompt = np.full(layers, (576 if images == 1 else 2144) + 48)
    ours = analysis.prefill_flops(c, prompt).sum() + analysis.tower_flops(clip, width, images)
    ours += analysis.logits_flops(c, int(prompt[-1]) + 99)
    ours += sum(analysis.decode_flops(c, prompt + i).sum() for i in range(1, 100))
    assert abs(ours / 1e12 / flops - 1) < 0.01
    assert abs(analysis.cache_bytes(c, prompt + 100, 2).sum() / 2**30 - memory) < 0.006  # rounded to two places
