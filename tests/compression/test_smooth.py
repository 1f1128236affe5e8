"""Smoothing of scores: cases by hand, a float64 loop over pairs of tokens, and what a composition keeps with it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from vlkv import policies
from vlkv.compression.observe import LayerBudget, Observation
from vlkv.policies import Smooth, compose

select = jax.jit(policies.select)


def observation(in_scope, grid=None):
    """All that smoothing looks at."""
    nothing = jnp.zeros((2, len(in_scope), 2))
    scope = in_scope
    return Observation(
        q=nothing, k=nothing, v=nothing, is_vision=scope, valid=scope, in_scope=scope, layer=0, grid=grid,
        budget=LayerBudget(asked=jnp.float32(1), mean=jnp.int32(1)),
    )  # fmt: skip


@partial(jax.jit, static_argnums=0)
def run(smooth, scores, in_scope, grid):
    return smooth(scores, observation(in_scope, grid))


def smoothed(smooth, scores, in_scope, grid=None):
    grid = None if grid is None else np.array(grid, np.int32)
    return np.asarray(run(smooth, np.array([scores], np.float32), np.array(in_scope), grid))[0]


def test_along_tokens_by_hand():
    scores, inside = [6, 0, 0, 12, 3, 9], [True] * 5 + [False]
    assert smoothed(Smooth(3), scores, inside).tolist() == [3, 2, 4, 5, 7.5, 9]
    assert smoothed(Smooth(2, one_sided=True), scores, inside).tolist() == [6, 3, 0, 6, 7.5, 9]
    assert smoothed(Smooth(3, pooling="max"), scores, inside).tolist() == [6, 6, 12, 12, 12, 9]
    assert smoothed(Smooth(1), scores, inside).tolist() == scores


def test_on_the_grid_by_hand():
    """2 x 3 patches with a newline after each line, then another image of 1 x 2."""
    newline = (0, -1, -1)
    grid = [(0, 0, 0), (0, 0, 1), (0, 0, 2), newline, (0, 1, 0), (0, 1, 1), (0, 1, 2), newline, (1, 0, 0), (1, 0, 1)]
    scores = [6, 0, 0, 100, 0, 0, 12, 100, 30, 0]
    inside = [True] * 10
    lines = smoothed(Smooth((1, 3)), scores, inside, grid)
    assert lines.tolist() == [3, 2, 0, 100, 0, 4, 6, 100, 15, 15]
    block = smoothed(Smooth((2, 2), one_sided=True), scores, inside, grid)
    assert block.tolist() == [6, 3, 0, 100, 3, 1.5, 3, 100, 30, 15]
    largest = smoothed(Smooth((2, 2), one_sided=True, pooling="max"), scores, inside, grid)
    assert largest.tolist() == [6, 6, 0, 100, 6, 6, 12, 100, 30, 30]


def test_the_grid_may_have_holes_and_padding_with_places():
    """Against a loop over pairs: a place without a token has neighbours on both sides, and padding is nowhere."""
    rng = np.random.default_rng(0)
    grid = np.array([(image, y, x) for image in range(2) for y in range(5) for x in range(6)])
    scores, among = rng.normal(size=(2, len(grid))), rng.random(len(grid)) < 0.6
    grid[~among] = grid[rng.permutation(np.flatnonzero(among))[: (~among).sum()]]  # places of other tokens
    for smooth in (Smooth((3, 5)), Smooth((4, 2), one_sided=True), Smooth((3, 3), pooling="max")):
        low = [size - 1 if smooth.one_sided else size // 2 for size in smooth.kernel]
        high = [0 if smooth.one_sided else size // 2 for size in smooth.kernel]
        want = scores.copy()
        for t in np.flatnonzero(among):
            away = grid[:, 1:] - grid[t, 1:]
            near = among & (grid[:, 0] == grid[t, 0]) & (away >= np.negative(low)).all(1) & (away <= high).all(1)
            want[:, t] = (np.max if smooth.pooling == "max" else np.mean)(scores[:, near], axis=1)
        got = run(smooth, scores.astype(np.float32), among, grid)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_measured_weights_of_each_head_against_a_loop_over_pairs():
    """On a grid with holes and in reading order; a pair counts with the weight of its offset, which has a direction."""
    rng = np.random.default_rng(3)
    grid = np.array([(image, y, x) for image in range(2) for y in range(4) for x in range(5)])
    scores, among = rng.normal(size=(2, len(grid))), rng.random(len(grid)) < 0.7
    each = [tuple(map(tuple, rng.uniform(0.1, 1, (3, 2)).round(2).tolist())) for _ in range(3)]
    each[2] = ((0.0, 0.5),) * 3  # one head does not use the last offset
    kernels = {"grid": [(0, 0), (1, -1), (-2, 1)], "order": [(0,), (3,), (-1,)]}
    for on, offsets in kernels.items():
        place = grid if on == "grid" else np.stack([np.zeros(len(grid), int), np.arange(len(grid))], axis=1)
        for pooling in ("avg", "max"):
            smooth = Smooth(tuple((*d, w) for d, w in zip(offsets, each, strict=True)), pooling=pooling)
            want = scores.copy()
            for head, t in ((h, t) for h in range(2) for t in np.flatnonzero(among)):
                terms = [
                    weight[0][head] * (scores[head, s] - min(0, scores[head, among].min()))
                    for s in np.flatnonzero(among)
                    for d, weight in zip(offsets, each, strict=True)
                    if (place[t] - place[s]).tolist() == [0, *d] and weight[0][head] > 0
                ]
                want[head, t] = (sum if pooling == "avg" else max)([*terms, 0.0])
            got = run(smooth, scores.astype(np.float32), among, grid)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_measured_weights_of_another_model_are_refused():
    kernel = ((0, ((1.0, 1.0),) * 3), (1, ((0.5, 0.2),) * 3))  # three layers of two heads
    q, k = np.zeros((2, 4, 8, 4), np.float32), np.zeros((2, 2, 8, 4), np.float32)
    policy = compose(policies.SnapKV(keep=0.3), smooth=Smooth(kernel))
    with pytest.raises(vlkv.InputError, match="weights for 3 layers, but the model has 2"):
        policies.select(policy, q, k, k, np.ones(8, bool))
    q, k = np.zeros((3, 4, 8, 4), np.float32), np.zeros((3, 1, 8, 4), np.float32)
    with pytest.raises(vlkv.InputError, match="weights for 2 key heads, but the model has 1"):
        policies.select(policy, q, k, k, np.ones(8, bool))


@pytest.mark.parametrize(
    "kernel",
    [(), ((0,),), ((0, 1.0), (0, 0.5)), ((0, 1.0), (0, 1, 0.5)), ((0, -1.0),), ((0, 0.0),), ((0.5, 1.0),), ((65, 1.0),),
     ((0, "1"),), ((0, float("nan")),), ((0, (1.0, 2.0)),), ((0, ((1.0,), (1.0, 2.0))),)],
)  # fmt: skip
def test_what_is_no_kernel_is_refused(kernel):
    with pytest.raises(vlkv.InputError, match="kernel="):
        Smooth(kernel)


def test_a_composition_ranks_by_smoothed_scores_and_pays_by_the_others():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 4, 40, 8)).astype(np.float32), rng.normal(size=(2, 2, 40, 8)).astype(np.float32)
    vision = (np.arange(40) >= 3) & (np.arange(40) < 33)
    plain, smooth = policies.AirCache(keep=0.2, window="text"), Smooth(4, one_sided=True)
    before = select(plain, q, k, k, vision)
    after = select(compose(plain, smooth=smooth), q, k, k, vision)
    np.testing.assert_array_equal(after.budgets, before.budgets)
    for layer in range(2):
        for head in range(2):
            scores = np.asarray(before.scores, np.float64)[layer, head, 3:33]
            means = [scores[max(0, t - 3) : t + 1].mean() for t in range(30)]
            count = int(before.budgets[layer, head])
            kept = np.flatnonzero(np.asarray(after.kept)[layer, head, 3:33])
            assert set(kept) == set(np.argsort(means)[::-1][:count])
    assert not np.array_equal(before.kept, after.kept)


def test_a_grid_must_be_given():
    q = np.zeros((1, 2, 8, 4), np.float32)
    with pytest.raises(vlkv.InputError, match="pass grid="):
        policies.select(compose(policies.SnapKV(keep=0.3), smooth=Smooth((3, 3))), q, q, q, np.ones(8, bool))
