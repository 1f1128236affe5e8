"""BACON besides its simulation in `numpy_policies`: negative scores, compositions, and layers with other tokens."""

import jax
import numpy as np
import pytest

import vlkv
from vlkv import policies


def test_negative_scores_are_shifted_and_calibrated():
    rng, inside = np.random.default_rng(0), np.arange(36) > 3
    scores, evidence = rng.normal(size=(2, 36)).astype(np.float32) - 3, rng.random((2, 36)).astype(np.float32)
    rank = jax.jit(policies.BACON(keep=0.5).rank)
    results = [
        np.argsort(
            np.asarray(rank(scores + shift, {"evidence": evidence, "earlier": evidence}, inside, np.full(2, 12))[0])[
                :, 4:
            ]
        )
        for shift in (0, -5)
    ]
    np.testing.assert_array_equal(*results)
    assert not (results[0] == np.argsort(scores[:, 4:])).all()


def test_without_strength_it_does_not_rank():
    with pytest.raises(vlkv.InputError, match="does not rank"):
        policies.make("compose(snapkv(keep=0.3), rank=bacon(keep=0.3, strength=0.0))")


def test_tokens_may_be_dropped_before_the_first_layer_but_not_between_layers(params, batch):
    between = policies.compose(policies.BACON(keep=0.4), reduce=policies.FastV(keep=0.5, layer=1))
    with pytest.raises(vlkv.InputError, match="BACON compares the tokens of successive layers, and FastV drops"):
        jax.eval_shape(lambda params: vlkv.prefill(params, batch, between, new_tokens=1), params)
    before = policies.compose(policies.BACON(keep=0.4, window=3), reduce=policies.DivPrune(keep=0.5))
    jax.eval_shape(lambda params: vlkv.prefill(params, batch, before, new_tokens=1), params)
