"""Smoothing of scores: cases by hand, a float64 loop over pairs of tokens, and what a composition keeps with it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.models import SMALL, tiny_llava, unequal_batch
from vlkv import policies
from vlkv.compression.observe import Observation
from vlkv.policies import Smooth, compose

select = jax.jit(policies.select)


def observation(in_scope, grid=None):
    """All that smoothing looks at."""
    nothing = jnp.zeros((1, len(in_scope), 2))
    scope = in_scope
    return Observation(
        q=nothing, k=nothing, v=nothing, is_vision=scope, valid=scope, in_scope=scope, asked=jnp.float32(1),
        mean_budget=jnp.int32(1),
        key=None, layer=0, max_instruction=1, grid=grid,
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


@pytest.mark.parametrize("smooth", [Smooth(5), Smooth((3, 5)), Smooth((3, 2), one_sided=True, pooling="max")])
def test_random_grids_against_a_loop_over_pairs(smooth):
    """Two images of different size, tokens on no grid and tokens out of scope among them, in no order."""
    rng = np.random.default_rng(0)
    places = [(0, y, x) for y in range(4) for x in range(6)] + [(1, y, x) for y in range(5) for x in range(3)]
    grid = np.array([*places, (-1, -1, -1), (0, -1, -1), (-1, -1, -1)])
    if isinstance(smooth.kernel, tuple):
        grid = grid[rng.permutation(len(grid))]
    inside, scores = grid[:, 0] >= 0, rng.normal(size=len(grid))
    two = isinstance(smooth.kernel, tuple)
    among = inside & (grid[:, 1] >= 0) if two else inside
    sizes = smooth.kernel if two else (smooth.kernel,)
    want = scores.copy()
    for t in np.flatnonzero(among):
        near = []
        for s in np.flatnonzero(among):
            distance = (grid[t] - grid[s])[1:] if two else np.array([t - s])
            low = [0 if smooth.one_sided else -(size // 2) for size in sizes]
            high = [size - 1 if smooth.one_sided else size // 2 for size in sizes]
            if (distance >= low).all() and (distance <= high).all() and (not two or grid[t, 0] == grid[s, 0]):
                near.append(scores[s])
        want[t] = max(near) if smooth.pooling == "max" else np.mean(near)
    np.testing.assert_allclose(smoothed(smooth, scores, inside, grid), want, rtol=1e-5, atol=1e-6)


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


@pytest.mark.full
def test_methods_that_rank_by_statistics_are_smoothed_too():
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(1, 2, 40, 8)).astype(np.float32), rng.normal(size=(1, 1, 40, 8)).astype(np.float32)
    vision = np.arange(40) < 30
    csp = policies.CSP(keep=0.3, scope="vision")
    plain, after = (select(p, q, k, k, vision) for p in (csp, compose(csp, smooth=Smooth(9))))
    for name in ("self", "cross"):
        want = [np.asarray(plain.extra[name])[0, 0, max(0, t - 4) : min(30, t + 5)].mean() for t in range(30)]
        np.testing.assert_allclose(after.extra[name][0, 0, :30], want, rtol=1e-5)


@pytest.mark.full
def test_generate_smooths_on_the_grid():
    """The cache holds what `select` chooses from the layers that were read, image by image."""
    params, inputs = tiny_llava(config=SMALL), unequal_batch()
    policy = compose(policies.SnapKV(keep=0.3, scope="vision", kernel=1), smooth=Smooth((3, 3)))
    prompt = programs.read_prompt(params, inputs)
    cache = programs.fill_cache(prompt, policy, new_tokens=1)
    q, k, v = (np.stack([np.asarray(getattr(layer, n))[0] for layer in prompt.layers]).swapaxes(1, 2) for n in "qkv")
    row = np.asarray(inputs.is_vision)[0], np.asarray(inputs.valid)[0], None
    chosen = select(policy, q, k, v, *row, np.asarray(inputs.grid)[0])
    held = jax.jit(vlkv.analysis.held_by_head, static_argnums=1)(cache, inputs.valid.shape[1])
    np.testing.assert_array_equal(held[0], chosen.kept)
    with pytest.raises(vlkv.InputError, match="pass grid="):
        policies.select(policy, q, k, v, row[0])


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Smooth(4), "must be odd, or give one_sided=True"),
        (lambda: Smooth((3, 4)), "must be odd"),
        (lambda: Smooth(0), "at least 1"),
        (lambda: compose(policies.Full(), smooth=Smooth(3)), "nothing to smooth"),
        (lambda: compose(policies.FastV(keep=0.5), smooth=Smooth(3)), "allocate, merge or smooth"),
    ],
)
def test_bad_input_is_one_line(made, said):
    with pytest.raises(vlkv.InputError, match=said) as error:
        made()
    assert "\n" not in str(error.value)


def test_smoothing_stays_when_a_composition_is_composed_again():
    smooth = Smooth(9)
    inner = compose(policies.SnapKV(keep=0.1), smooth=smooth)
    assert compose(inner, store=policies.KIVI(bits=4)).smoothed == smooth
    assert compose(inner, smooth=Smooth(3)).smoothed == Smooth(3)


@pytest.mark.usefixtures("shapes_for_arrays")  # which switches the types of arguments off
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Smooth(3.0), "whole number"),
        (lambda: Smooth((3, 3, 3)), "or two of them"),
        (lambda: Smooth((9,)), "or two of them"),
        (lambda: Smooth(3, one_sided=1), "True or False"),
        (lambda: Smooth(3, pooling="sum"), '"avg" or "max"'),
        (lambda: compose(policies.SnapKV(keep=0.1), smooth=3), "must be a Smooth"),
    ],
)
def test_wrong_types_are_one_line(made, said):
    with pytest.raises(vlkv.InputError, match=said) as error:
        made()
    assert "\n" not in str(error.value)
