"""BACON as a part of compositions. test_every_method.py has its equations."""

import jax
import pytest

import vlkv
from tests.families import tiny
from vlkv import InputError, policies


def test_tokens_must_be_the_same_in_all_layers():
    params, batch = tiny.make_model("llava"), tiny.make_batch("llava")
    between = policies.compose(policies.BACON(keep=0.4), reduce=policies.FastV(keep=0.5, layer=1))
    with pytest.raises(InputError, match="BACON compares the tokens of successive layers, and FastV drops"):
        jax.eval_shape(lambda params: vlkv.prefill(params, batch, between, new_tokens=1), params)
    before = policies.compose(policies.BACON(keep=0.4, window=3), reduce=policies.DivPrune(keep=0.5))
    jax.eval_shape(lambda params: vlkv.prefill(params, batch, before, new_tokens=1), params)
