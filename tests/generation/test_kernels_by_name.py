"""One seam chooses the kernels of a whole answer, and no choice changes the answer."""

import jax
import numpy as np
import pytest

import vlkv
from pallas_kernels import Kernels
from tests import programs
from vlkv import policies

REFERENCE = Kernels(
    decode_attention="reference", core_attention="reference", attention_mass="reference",
    attention_mass_rows="reference", prefill_attention="reference",
)  # fmt: skip
GIVEN = dict(policy=policies.AVL(keep=0.4, core=0.1), sampling=vlkv.Greedy(max_new_tokens=5))


@pytest.mark.full
def test_the_answer_is_the_same(params, batch):
    """Of four steps, the third attends to everything."""
    answers = [programs.generate(params, batch, **GIVEN, kernels=kernels) for kernels in (None, REFERENCE)]
    for name in ("tokens", "lengths", "kept"):
        np.testing.assert_array_equal(*(getattr(answer, name) for answer in answers))


@pytest.mark.parametrize("op", ["decode_attention", "core_attention", "attention_mass", "prefill_attention"])
def test_every_op_of_an_answer_hears_of_it(params, batch, op):
    with pytest.raises(ValueError, match=f"{op}: .*'none'.*available"):
        jax.eval_shape(vlkv.generate, params, batch, **GIVEN, kernels=Kernels(**{op: "none"}))
