"""attention_mass and attention_mass_rows against float64 numpy, in one block and in many."""

import math
from functools import partial

import jax
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import attention_mass, attention_mass_rows
from pallas_kernels.attention_mass import xla

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 8, 37
OPS = {"received": (attention_mass, "row_weight"), "given": (attention_mass_rows, "key_weight")}
either = pytest.mark.parametrize("op", OPS)


def run(op, q, k, weight, **options):
    """In one program, made anew each time: tests change what is chosen while it is traced."""
    function, name = OPS[op]
    given = {name: weight} | {
        name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)
    }
    return np.asarray(jax.jit(lambda q, k, given: function(q, k, **given, **options))(q, k, given))


def expected(op, q, k, weight, mask, place=None, statistic="sum", threshold=0.01, **options):
    places = np.arange(q.shape[1]) if place is None else place
    p, allowed = exact.probabilities(q, k, mask, places, **options)
    if op == "given":
        return np.einsum("rs,nts->rnt", np.float64(weight), p)
    values = {
        "sum": p, "square": p**2, "entropy": -p * np.log(np.where(p > 0, p, 1)),
        "count": allowed & (p >= threshold * p.max(axis=-1, keepdims=True)),
    }  # fmt: skip
    return np.einsum("rt,nts->rns", weight, np.float64(values[statistic]))


def make(scale=2.0):
    random = np.random.default_rng(0)
    q = scale * random.standard_normal((HEADS, LENGTH, HEAD_DIM)).astype(np.float32)
    k = random.standard_normal((KV_HEADS, LENGTH, HEAD_DIM)).astype(np.float32)
    weight = random.random((2, LENGTH)).astype(np.float32)
    return q, k, weight, random.random(LENGTH) < 0.8


@pytest.fixture
def in_blocks(monkeypatch):
    """37 rows in 13 blocks: more than the 8 groups, the last one ragged."""
    monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", 3 * HEADS * LENGTH)


@pytest.fixture(params=["one block", "blocks of 3"])
def blocks(request):
    if request.param == "blocks of 3":
        request.getfixturevalue("in_blocks")


@pytest.mark.default(
    "blocks of 3-received-xla", "blocks of 3-given-xla", "one block-received-ref", "one block-given-ref"
)
@pytest.mark.parametrize(
    ("op", "implementation", "causal", "softmax_n", "statistic"),
    [
        ("received", "xla", True, 1.0, "sum"),
        ("received", "reference", False, 4.0, "square"),
        ("received", "reference", True, 0.0, "entropy"),
        ("given", "xla", True, 4.0, None),
        ("given", "xla", False, 0.0, None),
        ("given", "reference", False, 4.0, None),
    ],
)
def test_statistics_of_all_rows(blocks, op, implementation, causal, softmax_n, statistic):
    q, k, weight, mask = make()
    options = dict(causal=causal, softmax_n=softmax_n) | (
        {"statistic": statistic, "threshold": 0.1} if statistic else {}
    )
    got = run(op, q, k, weight, key_mask=mask, implementation=implementation, **options)
    np.testing.assert_allclose(got, expected(op, q, k, weight, mask, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.default("1.0")
@pytest.mark.parametrize("softmax_n", [0.0, 1.0])
def test_known_denominators_one_head_after_the_other(monkeypatch, in_blocks, softmax_n):
    """Two rows of a batch, as a CPU runs long prompts; padding has lse = +inf, and keys that no row may attend to."""
    monkeypatch.setattr(xla, "_SMALL", 0)
    q, k, weight, mask = make()
    masks = np.stack([mask, np.arange(LENGTH) >= 4])
    allowed = masks[:, None] & np.tri(LENGTH, dtype=bool)
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
            want = expected("received", q, k, rows, masks[i], statistic=statistic, **options)
            np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-6)


@either
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gathered_rows_see_keys_up_to_their_own_place(in_blocks, op, implementation):
    q, k, weight, mask = make()
    place = np.array([36, 5, 20, 0, 21, 5, 9, 1])  # in no order, one of them twice
    weight = weight if op == "given" else np.array([[1, 1, 1, 1, 1, 0, 1, 1]], np.float32)
    got = run(op, q[:, place], k, weight, key_mask=mask, row_place=place, implementation=implementation)
    np.testing.assert_allclose(got, expected(op, q[:, place], k, weight, mask, place), rtol=1e-5, atol=1e-6)


@either
def test_rows_that_see_no_key_and_huge_logits(in_blocks, op):
    """Nothing is NaN; rows that see any key hand out all their weight, and those that see none nothing."""
    q, k, weight, _ = make(scale=2000.0)
    mask = np.arange(LENGTH) >= 4
    got = run(op, q, k, np.ones_like(weight) if op == "given" else weight, key_mask=mask)
    seen = np.cumsum(mask) > 0
    if op == "given":
        np.testing.assert_allclose(got, np.broadcast_to(seen, got.shape), rtol=1e-5)
    else:
        np.testing.assert_allclose(got.sum(axis=-1), np.tile((weight * seen).sum(axis=-1)[:, None], HEADS), rtol=1e-5)
    assert np.isfinite(run(op, q, k, weight, key_mask=mask, softmax_n=1.0)).all()


@either
@pytest.mark.parametrize(
    "change",
    [
        {"implementation": "mosaic"},
        {"weight": np.ones((1, 5), np.float32)},
        {"key_mask": np.ones(5, bool)},
        {"k": np.ones((3, LENGTH, HEAD_DIM), np.float32)},
        {"q": np.ones((HEADS, 20, HEAD_DIM), np.float32), "weight": np.ones((1, 20), np.float32)},  # needs row_place
    ],
)
def test_what_does_not_fit_is_refused(op, change):
    q, k, weight, mask = make()
    with pytest.raises(Exception, match=OPS[op][0].__name__):
        run(op, **{"q": q, "k": k, "weight": weight, "key_mask": mask, **change})
