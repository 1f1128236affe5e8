"""attention_mass against float64 numpy, in one block and in many."""

import math
from functools import partial

import jax
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import attention_mass
from pallas_kernels.attention_mass import xla

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def run(q, k, **options):
    """In one program, made anew each time: tests change what is chosen while it is traced."""
    arrays = {name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)}
    return jax.jit(lambda q, k, arrays: attention_mass(q, k, **arrays, **options))(q, k, arrays)


def expected_mass(q, k, weight, mask, place=None, causal=True, softmax_n=0.0, statistic="sum", threshold=0.01):
    places = np.arange(q.shape[1]) if place is None else place
    p, allowed = exact.probabilities(q, k, mask, places, causal=causal, softmax_n=softmax_n)
    if statistic == "square":
        p = p**2
    if statistic == "entropy":
        p = -p * np.log(np.where(p > 0, p, 1))
    if statistic == "count":
        p = allowed & (p >= threshold * p.max(axis=-1, keepdims=True))
    return np.einsum("rt,nts->rns", weight, np.float64(p))


def make(rows, keys, seed=0, scale=2.0):
    random = np.random.default_rng(seed)
    q = scale * random.standard_normal((HEADS, rows, HEAD_DIM)).astype(np.float32)
    k = random.standard_normal((KV_HEADS, keys, HEAD_DIM)).astype(np.float32)
    weight = random.random((2, rows)).astype(np.float32)
    return q, k, weight, random.random(keys) < 0.8


@pytest.fixture(params=["one block", "blocks of 3"])
def blocks(request, monkeypatch):
    """37 rows in one block, or in 13: more than the 8 groups, the last one ragged."""
    if request.param == "blocks of 3":
        monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", 3 * HEADS * 37)
    return request.param


@pytest.mark.default("blocks of 3-xla", "one block-reference")
@pytest.mark.parametrize(
    ("implementation", "causal", "softmax_n", "statistic"),
    [("xla", True, 1.0, "sum"), ("reference", False, 4.0, "square"), ("reference", True, 0.0, "entropy")],
)
def test_statistics_of_all_rows(blocks, implementation, causal, softmax_n, statistic):
    q, k, weight, mask = make(37, 37)
    options = dict(causal=causal, softmax_n=softmax_n, statistic=statistic, threshold=0.1)
    got = run(q, k, row_weight=weight, key_mask=mask, implementation=implementation, **options)
    np.testing.assert_allclose(got, expected_mass(q, k, weight, mask, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.default("1.0")
@pytest.mark.parametrize("softmax_n", [0.0, 1.0])
def test_known_denominators_in_many_blocks_one_head_after_the_other(monkeypatch, softmax_n):
    """Two rows of a batch, as a CPU runs long prompts; padding has lse = +inf, and keys that no row may attend to."""
    monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", 3 * HEADS * 37)
    monkeypatch.setattr(xla, "_SMALL", 0)
    q, k, weight, mask = make(37, 37)
    masks = np.stack([mask, np.arange(37) >= 4])
    allowed = masks[:, None] & np.tri(37, dtype=bool)
    logits = np.einsum("nth,nsh->nts", np.float64(q), np.repeat(np.float64(k), 2, axis=0)) / math.sqrt(HEAD_DIM)
    with np.errstate(divide="ignore"):
        lse = np.log((np.exp(logits) * allowed[:, None]).sum(axis=-1))
    lse = np.where(masks[:, None], lse, np.inf).astype(np.float32)
    statistics = ("sum", "square", "entropy", "count")
    options = {"softmax_n": softmax_n, "threshold": 0.1}

    @jax.jit
    @partial(jax.vmap, in_axes=(None, None, None, 0, 0))
    def masses(q, k, weight, mask, lse):
        given = dict(row_weight=weight, key_mask=mask, lse=lse, implementation="xla", **options)
        return [attention_mass(q, k, statistic=statistic, **given) for statistic in statistics]

    for statistic, got in zip(statistics, masses(q, k, weight, masks, lse), strict=True):
        for i in range(2):
            rows = weight * masks[i] if statistic != "count" else weight  # "count" does not use lse
            want = expected_mass(q, k, rows, masks[i], statistic=statistic, **options)
            np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gathered_rows_see_keys_up_to_their_own_place(monkeypatch, implementation):
    monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", 3 * HEADS * 37)
    q, k, _, mask = make(37, 37)
    place = np.array([36, 5, 20, 0, 21, 5, 9, 1])  # in no order, one of them twice
    weight = np.array([[1, 1, 1, 1, 1, 0, 1, 1]], np.float32)
    got = run(q[:, place], k, row_weight=weight, key_mask=mask, row_place=place, implementation=implementation)
    np.testing.assert_allclose(got, expected_mass(q[:, place], k, weight, mask, place), rtol=1e-5, atol=1e-6)


@pytest.mark.default("blocks of 3")
def test_rows_that_see_no_key_and_huge_logits(blocks):
    """Nothing is NaN; rows that see any key hand out all their weight."""
    q, k, weight, _ = make(37, 37, scale=2000.0)
    mass = jax.jit(
        lambda mask, n: attention_mass(q, k, row_weight=weight, key_mask=mask, softmax_n=n), static_argnums=1
    )
    for mask in (np.arange(37) >= 4, np.zeros(37, bool)):  # rows 0..3 see nothing, and all rows
        got = np.asarray(mass(mask, 0.0))
        seen = np.cumsum(mask) > 0
        np.testing.assert_allclose(got.sum(axis=-1), np.tile((weight * seen).sum(axis=-1)[:, None], HEADS), rtol=1e-5)
    assert np.isfinite(mass(np.arange(37) >= 4, 1.0)).all()


jit_mass = jax.jit(attention_mass)


def test_golden_column_sums_and_windows(golden):
    for name in golden.names("column_sums_*"):
        g = golden(name)
        q, k, length = g["q"], g["k"], g["q"].shape[1]
        windows = [length, *g["window_sizes"].tolist()]
        weight = np.array([np.arange(length) >= length - w for w in windows], np.float32)
        everything, *windowed = np.asarray(jit_mass(q, k, row_weight=weight, key_mask=np.ones(length, bool)))
        np.testing.assert_allclose(everything, g["paper_column_sums"], rtol=1e-5)
        np.testing.assert_allclose(everything.mean(axis=0), g["paper_head_mean_column_sums"], rtol=1e-5)
        np.testing.assert_allclose(windowed, g["paper_windowed_column_sums"], rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"implementation": "mosaic"},
        {"row_weight": np.ones((1, 5), np.float32)},
        {"key_mask": np.ones(5, bool)},
        {"k": np.ones((3, 37, HEAD_DIM), np.float32)},
        {"k": np.ones((KV_HEADS, 20, HEAD_DIM), np.float32), "key_mask": np.ones(20, bool)},  # causal needs row_place
    ],
)
def test_what_does_not_fit_is_refused(change):
    q, k, weight, mask = make(37, 37)
    with pytest.raises(Exception, match="attention_mass"):
        attention_mass(**{"q": q, "k": k, "row_weight": weight, "key_mask": mask, **change})
