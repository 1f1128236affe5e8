"""LightKV against the golden vectors and against float64 numpy written from Eqs. 4-8."""

import math

import jax
import numpy as np
import pytest

from tests import programs
from tests.policies.arrays import observation, tokens_of
from vlkv import InputError
from vlkv.policies.lightkv import LightKV, processed

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 8, 16
prefill = programs.prefill
_reduce = jax.jit(lambda policy, tokens, obs, stage: policy.reduce(tokens, obs, stage=stage), static_argnums=3)
guidance = jax.jit(lambda policy, obs: policy.guidance(obs))


def reduce(policy, tokens, obs, stage=0):
    made, kept = _reduce(policy, tokens, obs, stage)
    return jax.tree.map(np.asarray, made), np.asarray(kept)


# --- the equations, image by image and window by window --------------------------------------------------------------


def attention_to_text(q, k, is_vision, valid, released):
    """xi (Eq. 7), softmax over keys, or over queries as released."""
    k = np.repeat(np.float64(k), len(q) // len(k), axis=0)
    logits = np.einsum("nth,nsh->nts", np.float64(q), k) / math.sqrt(q.shape[-1])
    there = valid[:, None] if released else valid[None]
    e = np.exp(logits) * there
    p = e / e.sum(axis=1 if released else 2, keepdims=True)
    return p[:, :, valid & ~is_vision].sum(axis=(0, 2))


def expected(x, grid, inside, xi, sides, rho, *, first_stage, least=0, edges="nearest"):
    """Hidden states after one stage, which tokens are gone, and what they went into (-1)."""
    x = np.float64(x).copy()
    target, into = np.full(len(x), -1), {}
    for image in set(grid[inside, 0]):
        tokens = np.flatnonzero(inside & (grid[:, 0] == image))
        if len(tokens) < least:
            continue
        line, column = grid[tokens, 1], grid[tokens, 2]
        lines, columns = line.max() + 1, column.max() + 1
        if not first_stage:
            lines = columns = math.ceil(math.sqrt(len(tokens)))
            line, column = np.divmod(np.arange(len(tokens)), columns)
        for rows in np.array_split(np.arange(lines), sides):
            for some in np.array_split(np.arange(columns), sides):
                window = tokens[np.isin(line, rows) & np.isin(column, some)]
                a, b = window[::2], window[1::2]
                if len(b) == 0:
                    continue
                u, w = (x[i] / np.linalg.norm(x[i], axis=1, keepdims=True) for i in (a, b))
                distance = 1 - u @ w.T
                first = np.argsort(distance.min(axis=1), kind="stable")
                first = first[: min(int(rho * len(window)), len(window) // 2)]
                target[a[first]] = b[distance.argmin(axis=1)[first]]
                near = distance[first] <= distance[first].min(axis=1).max() if len(first) else distance[first] < 0
                into |= {i: a[first][near[:, j]] for j, i in enumerate(b)}
    merged = x.copy()
    if edges == "nearest":
        into = {b: np.flatnonzero(target == b) for b in set(target[target >= 0])}
    for b, tokens in into.items():
        together = [b, *tokens]
        merged[b] = (xi[together, None] * x[together]).sum(axis=0) / xi[together].sum()
    return merged, target


def make(sides, *, seed=0, before=3, after=4, pad=(0, 0), lone=0):
    """A row with images of the given (lines, columns), text around them, `lone` vision tokens on no grid."""
    random = np.random.default_rng(seed)
    grid = [[-1, -1, -1]] * before
    for number, (lines, columns) in enumerate(sides):
        grid += [[number, -1, -1]] * lone
        grid += [[number, i, j] for i in range(lines) for j in range(columns)]
    grid = np.array(grid + [[-1, -1, -1]] * after)
    length = len(grid)
    x = random.standard_normal((length, WIDTH)).astype(np.float32)
    q = random.standard_normal((HEADS, length, HEAD_DIM)).astype(np.float32)
    k = random.standard_normal((KV_HEADS, length, HEAD_DIM)).astype(np.float32)
    grid = np.pad(grid, [pad, (0, 0)], constant_values=-1)
    valid = np.pad(np.ones(length, bool), pad)
    x, q, k = np.pad(x, [pad, (0, 0)]), np.pad(q, [(0, 0), pad, (0, 0)]), np.pad(k, [(0, 0), pad, (0, 0)])
    return x, q, k, grid, grid[:, 0] >= 0, valid


def agrees(policy, case, stage=0):
    x, q, k, grid, is_vision, valid = case
    tokens = tokens_of(x, grid, is_vision, valid)
    made, kept = reduce(policy, tokens, observation(tokens, q, k), stage)
    released = policy.variant == "released"
    xi = attention_to_text(q, k, is_vision, valid, released)
    sides = policy.windows[stage]
    want, target = expected(
        x, grid, valid & is_vision & (grid[:, 1] >= 0), xi, sides, policy.ratios[stage], first_stage=stage == 0,
        least=8 * sides**2 if released else 0, edges=policy.edges,
    )  # fmt: skip
    np.testing.assert_array_equal(kept, valid & (target < 0))
    np.testing.assert_allclose(made.x[kept], want[kept], rtol=1e-5, atol=1e-5)
    sizes = 1 + np.bincount(target[target >= 0], minlength=len(x))
    np.testing.assert_array_equal(made.size[kept], sizes[kept])
    return made, kept


# --- tests -----------------------------------------------------------------------------------------------------------


def test_variants_and_options_agree_with_the_equations():
    layers = {"layers": (2,), "windows": (2,)}
    agrees(LightKV(**layers, rho=0.31), make([(6, 5)], pad=(5, 0)))
    agrees(LightKV(**layers, edges="all"), make([(6, 5)], pad=(5, 0)))
    made, kept = agrees(LightKV(**layers, variant="released"), make([(7, 5), (5, 6)], pad=(2, 3)))
    image = np.asarray(made.grid[:, 0])
    assert (~kept)[image == 0].any() and kept[image == 1].all(), "30 tokens are fewer than 8 x 2^2"
    positions = made.positions[kept, 0]
    np.testing.assert_array_equal(positions, np.arange(len(positions)))


def test_lightkv_equation_9_and_the_rates_of_table_8():
    assert abs(processed((10, 20, 30), 40, (0.5,) * 3) - 0.469) < 5e-4, "the example of Sec. 3.3"
    for depth in (28, 32, 40):
        for rate in (0.55, 0.4, 0.3, 0.2):
            policy = LightKV(rate=rate)
            policy.check_model(depth)
            assert abs(processed(policy.reductions(depth), depth, policy.ratios) - rate) < 0.011, (depth, rate)
    assert LightKV(rate=processed((15, 23, 31), 40, (0.5,) * 3)).reductions(40) == (15, 23, 31)
    with pytest.raises(InputError, match=r"rate=0\.1 must lie between 0\.125"):
        LightKV(rate=0.1)
