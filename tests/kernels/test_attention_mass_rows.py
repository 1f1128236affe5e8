"""attention_mass_rows against float64 numpy, in one block and in many."""

import jax
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import attention_mass_rows
from pallas_kernels.attention_mass_rows import xla
from tests.kernels import test_attention_mass
from tests.kernels.test_attention_mass import HEAD_DIM, HEADS

LENGTH = 37


def expected(q, k, weight, mask, place=None, **options):
    p, _ = exact.probabilities(q, k, mask, np.arange(LENGTH) if place is None else place, **options)
    return np.einsum("rs,nts->rnt", np.float64(weight), p)


def make(scale=2.0):
    return test_attention_mass.make(LENGTH, LENGTH, scale=scale)


@pytest.fixture(params=["one block", "blocks of 3"])
def blocks(request, monkeypatch):
    """37 rows in one block, or in 13: more than the 8 groups, the last one ragged."""
    if request.param == "blocks of 3":
        monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", 3 * HEADS * LENGTH)
    return request.param


def run(*arrays, **options):
    """In one program, made anew each time: tests change what is chosen while it is traced."""
    given = {name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)}
    return np.asarray(jax.jit(lambda q, k, given: attention_mass_rows(q, k, **given, **options))(*arrays, given))


@pytest.mark.default("blocks of 3-xla", "one block-reference")
@pytest.mark.parametrize(
    ("implementation", "causal", "softmax_n"), [("xla", True, 4.0), ("xla", False, 0.0), ("reference", False, 4.0)]
)
def test_causal_or_not_with_n_in_the_denominator(blocks, implementation, causal, softmax_n):
    q, k, weight, mask = make()
    options = dict(causal=causal, softmax_n=softmax_n)
    got = run(q, k, key_weight=weight, key_mask=mask, implementation=implementation, **options)
    np.testing.assert_allclose(got, expected(q, k, weight, mask, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gathered_rows_see_keys_up_to_their_own_place(monkeypatch, implementation):
    monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", 3 * HEADS * LENGTH)
    q, k, weight, mask = make()
    place = np.array([36, 5, 20, 0, 21, 5, 9, 1])  # in no order, one of them twice
    got = run(q[:, place], k, key_weight=weight, key_mask=mask, row_place=place, implementation=implementation)
    np.testing.assert_allclose(got, expected(q[:, place], k, weight, mask, place), rtol=1e-5, atol=1e-6)


def test_a_row_that_sees_no_key_gives_nothing_and_no_nan():
    q, k, weight, _ = make()
    mask = np.arange(LENGTH) >= 4  # rows 0..3 see nothing
    got = run(q, k, key_weight=weight, key_mask=mask)
    assert not got[..., :4].any()
    np.testing.assert_allclose(got, expected(q, k, weight, mask), rtol=1e-5, atol=1e-6)


def test_huge_logits_stay_finite_and_weights_of_one_give_one():
    q, k, _, mask = make(scale=2000.0)
    given = dict(key_weight=np.ones((1, LENGTH), np.float32), key_mask=mask)
    np.testing.assert_allclose(run(q, k, causal=False, **given), 1, rtol=1e-5)
    assert np.isfinite(run(q, k, softmax_n=1.0, **given)).all()


@pytest.mark.parametrize(
    "change",
    [
        {"implementation": "mosaic"},
        {"key_weight": np.ones((1, 5), np.float32)},
        {"key_mask": np.ones(5, bool)},
        {"k": np.ones((3, LENGTH, HEAD_DIM), np.float32)},
        {"q": np.ones((HEADS, 20, HEAD_DIM), np.float32)},  # causal needs row_place
    ],
)
def test_what_does_not_fit_is_refused(change):
    q, k, weight, mask = make()
    with pytest.raises(Exception, match="attention_mass_rows"):
        attention_mass_rows(**{"q": q, "k": k, "key_weight": weight, "key_mask": mask, **change})
