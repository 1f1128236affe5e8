"""One seam chooses the kernels of a whole answer, and no choice changes the answer."""

import jax
import numpy as np
import pytest

import vlkv
from pallas_kernels import Kernels
from tests import programs
from vlkv import policies
from vlkv.mini import pages

REFERENCE = Kernels(
    decode_attention="reference", core_attention="reference", attention_mass="reference",
    attention_mass_rows="reference", prefill_attention="reference",
)  # fmt: skip
SAMPLING = vlkv.Greedy(max_new_tokens=5)


@pytest.fixture(scope="module")
def case(miniature):
    processor = vlkv.load_processor(miniature())
    samples = list(pages.held_out(2, seed=3))
    inputs = processor([s.image for s in samples], [s.question for s in samples])
    return vlkv.load_params(miniature()), inputs


@pytest.mark.full
def test_the_answer_is_the_same(case):
    policy = policies.AVL(keep=0.4, core=0.1)  # of four steps, the third attends to everything
    answer = programs.generate
    answers = [answer(*case, policy=policy, sampling=SAMPLING, kernels=kernels) for kernels in (None, REFERENCE)]
    for name in ("tokens", "lengths", "kept"):
        np.testing.assert_array_equal(*(getattr(answer, name) for answer in answers))


@pytest.mark.parametrize("op", ["decode_attention", "core_attention", "attention_mass", "prefill_attention"])
def test_every_op_of_an_answer_hears_of_it(case, op):
    policy = policies.AVL(keep=0.4, core=0.1)
    with pytest.raises(ValueError, match=f"{op}: .*'none'.*available"):
        jax.eval_shape(vlkv.generate, *case, policy=policy, sampling=SAMPLING, kernels=Kernels(**{op: "none"}))
