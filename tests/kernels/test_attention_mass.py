"""attention_mass against float64 numpy, in one block and in many."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import attention_mass
from pallas_kernels.attention_mass import xla

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def run(q, k, **options):
    """In one program, made anew each time: tests change what is chosen while it is traced."""
    arrays = {name: options.pop(name) for name in list(options) if isinstance(options[name], jax.Array)}
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
    return jnp.array(q), jnp.array(k), jnp.array(weight), jnp.array(random.random(keys) < 0.8)


@pytest.fixture(params=["one block", "blocks of 3"])
def blocks(request, monkeypatch):
    """37 rows in one block, or in 13: more than the 8 groups, the last one ragged."""
    if request.param == "blocks of 3":
        monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", 3 * HEADS * 37)
    return request.param


@pytest.mark.default("blocks of 3-1.0-True-xla", "blocks of 3-4.0-False-reference")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softmax_n", [0.0, 1.0, 4.0])
def test_sums_causal_or_not_with_n_in_the_denominator(blocks, implementation, causal, softmax_n):
    q, k, weight, mask = make(37, 37)
    got = run(q, k, row_weight=weight, key_mask=mask, causal=causal, softmax_n=softmax_n, implementation=implementation)
    np.testing.assert_allclose(got, expected_mass(q, k, weight, mask, None, causal, softmax_n), rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("statistic", ["square", "entropy", "count"])
def test_squares_entropies_and_counts(blocks, implementation, statistic):
    q, k, weight, mask = make(37, 37)
    got = run(q, k, row_weight=weight, key_mask=mask, statistic=statistic, threshold=0.1, implementation=implementation)
    want = expected_mass(q, k, weight, mask, statistic=statistic, threshold=0.1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("statistic", ["sum", "square", "entropy", "count"])
@pytest.mark.parametrize("softmax_n", [0.0, 1.0])
def test_known_denominators_in_many_blocks_one_head_after_the_other(monkeypatch, statistic, softmax_n):
    """Two rows of a batch, as a CPU runs long prompts; padding has lse = +inf, and keys that no row may attend to."""
    monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", 3 * HEADS * 37)
    monkeypatch.setattr(xla, "_SMALL", 0)
    q, k, weight, mask = make(37, 37)
    masks = np.stack([mask, np.arange(37) >= 4])
    allowed = masks[:, None] & np.tri(37, dtype=bool)
    logits = np.einsum("nth,nsh->nts", np.float64(q), np.repeat(np.float64(k), 2, axis=0)) / math.sqrt(HEAD_DIM)
    with np.errstate(divide="ignore"):
        lse = np.log((np.exp(logits) * allowed[:, None]).sum(axis=-1))
    lse = jnp.asarray(np.where(masks[:, None], lse, np.inf), jnp.float32)
    options = {"statistic": statistic, "softmax_n": softmax_n, "threshold": 0.1}

    def one(mask, lse):
        return run(q, k, row_weight=weight, key_mask=mask, lse=lse, implementation="xla", **options)

    got = jax.vmap(one)(jnp.asarray(masks), lse)
    for i in range(2):
        rows = weight * masks[i] if statistic != "count" else weight  # "count" does not use lse
        want = expected_mass(q, k, rows, masks[i], **options)
        np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gathered_rows_see_keys_up_to_their_own_place(monkeypatch, implementation):
    monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", 3 * HEADS * 37)
    q, k, _, mask = make(37, 37)
    place = jnp.array([36, 5, 20, 0, 21, 5, 9, 1])  # in no order, one of them twice
    weight = jnp.array([[1.0, 1, 1, 1, 1, 0, 1, 1]])
    got = run(q[:, place], k, row_weight=weight, key_mask=mask, row_place=place, implementation=implementation)
    np.testing.assert_allclose(got, expected_mass(q[:, place], k, weight, mask, place), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_row_that_sees_no_key_adds_nothing_and_no_nan(blocks):
    q, k, weight, _ = make(37, 37)
    mask = jnp.arange(37) >= 4  # rows 0..3 see nothing
    got = run(q, k, row_weight=weight, key_mask=mask)
    want = expected_mass(q, k, weight, mask)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not np.asarray(run(q, k, row_weight=weight, key_mask=jnp.zeros(37, bool))).any()


@pytest.mark.full
def test_huge_logits_stay_finite():
    q, k, weight, mask = make(37, 37, scale=2000.0)
    for n in (0.0, 1.0):
        got = np.asarray(run(q, k, row_weight=weight, key_mask=mask, softmax_n=n))
        assert np.isfinite(got).all()
        if n == 0:
            seen = np.asarray(mask)[:1] | (np.cumsum(mask) > 0)  # rows that see any key hand out all their weight
            np.testing.assert_allclose(got.sum(axis=-1)[:, 0], (np.asarray(weight) * seen).sum(axis=-1), rtol=1e-5)


jit_mass = jax.jit(attention_mass)


def test_golden_column_sums_and_windows(golden):
    for name in golden.names("column_sums_*"):
        g = golden(name)
        q, k, length = jnp.array(g["q"]), jnp.array(g["k"]), g["q"].shape[1]
        windows = [length, *g["window_sizes"].tolist()]
        weight = jnp.array([np.arange(length) >= length - w for w in windows], jnp.float32)
        everything, *windowed = np.asarray(jit_mass(q, k, row_weight=weight, key_mask=jnp.ones(length, bool)))
        np.testing.assert_allclose(everything, g["paper_column_sums"], rtol=1e-5)
        np.testing.assert_allclose(everything.mean(axis=0), g["paper_head_mean_column_sums"], rtol=1e-5)
        np.testing.assert_allclose(windowed, g["paper_windowed_column_sums"], rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"implementation": "mosaic"},
        {"row_weight": jnp.ones((1, 5))},
        {"key_mask": jnp.ones(5, bool)},
        {"k": jnp.ones((3, 37, HEAD_DIM))},
        {"k": jnp.ones((KV_HEADS, 20, HEAD_DIM)), "key_mask": jnp.ones(20, bool)},  # causal needs row_place
    ],
)
def test_what_does_not_fit_is_refused(change):
    q, k, weight, mask = make(37, 37)
    with pytest.raises(Exception, match="attention_mass"):
        attention_mass(**{"q": q, "k": k, "row_weight": weight, "key_mask": mask, **change})
