"""Lorenz curves, Gini, divergence and agreement of rankings, on numbers small enough to check by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlkv import analysis

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
