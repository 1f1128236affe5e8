"""BACON with more layers than it looks back, and as a part of compositions. test_reference.py has its equations."""

import jax
import numpy as np
import pytest

from tests.families import tiny
from tests.policies import numpy_policies as reference
from vlkv import InputError, policies

LAYERS, HEADS, KV_HEADS, LENGTH, HEAD_DIM = 7, 4, 2, 30, 8
select = jax.jit(policies.select, static_argnums=0)


@pytest.fixture(scope="module")
def prompt():
    random = np.random.default_rng(4)
    q, k = (2 * random.standard_normal((LAYERS, n, LENGTH, HEAD_DIM)).astype(np.float32) for n in (HEADS, KV_HEADS))
    return q, k, (np.arange(LENGTH) > 2) & (np.arange(LENGTH) < 20)


@pytest.mark.default("4")
@pytest.mark.parametrize("earlier", [2, 4])
def test_evidence_of_the_layers_before(prompt, earlier):
    q, k, vision = prompt
    policy = policies.BACON(budget=9, window=3, kernel=3, earlier=earlier, strength=2.0)
    kept, _, _ = reference.bacon(
        reference.Prompt(q, k, vision, "all", budget=9), window=3, kernel=3, earlier=earlier, strength=2.0
    )
    np.testing.assert_array_equal(select(policy, q, k, k, vision).kept, kept)
    other = policies.BACON(budget=9, window=3, kernel=3, earlier=0, strength=2.0)
    assert (select(other, q, k, k, vision).kept != kept).any()


def test_tokens_must_be_the_same_in_all_layers():
    params, batch = tiny.make_model("llava"), tiny.make_batch("llava")
    between = policies.compose(policies.BACON(keep=0.4), reduce=policies.FastV(keep=0.5, layer=1))
    with pytest.raises(InputError, match="BACON compares the tokens of successive layers, and FastV drops"):
        tiny.answer(params, batch, between)
    before = policies.compose(policies.BACON(keep=0.4, window=3), reduce=policies.DivPrune(keep=0.5))
    tiny.check_output(batch, tiny.answer(params, batch, before), before)
