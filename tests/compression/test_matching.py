"""Matching and folding of tokens against float64 numpy with whole matrices, and against published vectors."""

from functools import partial

import jax
import numpy as np
import pytest

from vlkv.compression import matching

closest = jax.jit(matching.closest)
merge_order = jax.jit(matching.merge_order)
fold = jax.jit(matching.fold)
sizes, largest = jax.jit(matching.sizes), jax.jit(matching.largest)
LENGTH, WIDTH = 53, 6


def cosines(x):
    u = np.float64(x) / np.maximum(np.linalg.norm(np.float64(x), axis=1, keepdims=True), 1e-12)
    return u @ u.T


@pytest.fixture
def random():
    return np.random.default_rng(5)


@pytest.fixture
def case(random):
    """Tokens in groups of which one is empty of receiving tokens and one has a single token."""
    group = random.choice([-1, 3, 7, 1000], LENGTH)
    group[17] = 5
    receiving = (random.random(LENGTH) < 0.4) & ~np.isin(group, [7, 5])
    return random.standard_normal((LENGTH, WIDTH)).astype(np.float32), receiving, group.astype(np.int32)


def test_groups_are_counted_and_ranked(case, random):
    _, mask, group = case
    value = random.integers(-3, 4, LENGTH)  # many ties
    functions = matching.sum_within, matching.largest_within, matching.rank_within
    run = jax.jit(
        lambda mask, value, group: [f(group, x) for f, x in zip(functions, (mask, value, value), strict=True)]
    )
    sums, best, rank = map(np.asarray, run(mask, value, group))
    for i in range(LENGTH):
        mine = np.flatnonzero(group == group[i])
        assert sums[i] == mask[mine].sum() and best[i] == value[mine].max()
    for g in set(group):
        mine = np.flatnonzero(group == g)
        order = mine[np.argsort(value[mine], kind="stable")]
        np.testing.assert_array_equal(rank[order], np.arange(len(mine)))
    np.testing.assert_array_equal(jax.jit(matching.numbered)(group), np.unique(group, return_inverse=True)[1])


@pytest.mark.parametrize("elements", [2**22, 4 * (LENGTH // 2)], ids=["one block", "blocks of 4"])
def test_closest_of_the_same_group(monkeypatch, case, elements):
    monkeypatch.setattr(matching, "_BLOCK_ELEMENTS", elements)
    x, receiving, group = case
    run = jax.jit(partial(matching.closest))  # traced anew: the size of a block is patched
    target, cosine = (np.asarray(y) for y in run(x, receiving, group))
    want = np.where(receiving & (group[:, None] == group), cosines(x), -np.inf)
    np.testing.assert_allclose(cosine, want.max(axis=1), atol=1e-6)
    found = np.isfinite(cosine)
    assert found.any() and not found[group == 7].any()
    np.testing.assert_array_equal(target[found], want.argmax(axis=1)[found])


def test_ties_go_to_the_earlier_token_on_both_sides():
    x = np.array([[1, 0], [2, 0], [3, 0], [0, 0], [4, 0], [5, 0], [1, 1], [0, 1]], np.float32)  # twice one direction
    even, group = np.arange(8) % 2 == 0, np.zeros(8, np.int32)
    target, cosine = map(np.asarray, closest(x, ~even, group))
    assert target[0] == target[2] == target[4] == 1
    merged = np.asarray(merge_order(cosine, even, group)) < 2
    np.testing.assert_array_equal(np.flatnonzero(merged), [0, 2])
    assert np.isfinite(cosine).all(), "a vector of zeros is like none, and no NaN"


# --- a class token at place 0, which is neither merged nor receives ---------------------------------------------------
