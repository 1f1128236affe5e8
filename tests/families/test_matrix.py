"""A policy of every stage on each family, and behind a marker each method on each family.

tests/policies/test_every_method.py has each method on one family or two. benchmarks/results/matrix.json says which
methods have run on which families; a new method or family is run with `pytest -m matrix` and then added there.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import vlkv
from tests.families import tiny
from vlkv import policies

MATRIX = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "matrix.json").read_text())


def test_no_family_is_forgotten():
    assert set(tiny.FAMILIES) == set(tiny.TINY)
    for family in tiny.FAMILIES:
        batch = tiny.make_batch(family)
        assert [n > 0 for n in batch.is_vision.sum(axis=1)] == [True, True, False], family
        assert len(set(batch.valid.sum(axis=1))) == 3, family


def test_every_method_has_run_on_every_family():
    assert set(policies.registry) <= set(MATRIX["methods"]) and set(tiny.FAMILIES) <= set(MATRIX["families"])
    assert all(set(refused) <= set(tiny.FAMILIES) for refused in MATRIX["refused"].values())


EVERY_STAGE = policies.compose(
    policies.SnapKV(keep=0.5), allocate=policies.PyramidKV, merge=policies.LookM, step=policies.H2O,
    reduce=policies.LightKV(layers=(1,), windows=(2,)), store=policies.KIVI,
)  # fmt: skip


@pytest.mark.full
@pytest.mark.ci(  # for their different decoders, positions or inputs
    "[llava_next]", "qwen3_5_moe", "glm4v", "gemma4", "eve",
)  # fmt: skip
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_policy_of_every_stage_on_every_family(family):
    """Reduced in prefill, scored, allotted per layer, merged, quantised, and evicted from while decoding.

    Rows in another order get the same answers, because all bounds are those of the batch.
    """
    params, batches = tiny.make_model(family), [tiny.make_batch(family, reverse=turned) for turned in (False, True)]
    first, second = (tiny.answer(params, batch, EVERY_STAGE) for batch in batches)
    tiny.check_output(batches[0], first, EVERY_STAGE)
    np.testing.assert_array_equal(first.tokens, second.tokens[::-1])


@pytest.mark.matrix
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_policy_on_every_family(family):
    params, batch = tiny.make_model(family), tiny.make_batch(family)
    for name in policies.registry:
        reason = MATRIX["refused"].get(name, {}).get(family)
        if reason is not None:
            with pytest.raises(vlkv.InputError, match=reason):
                tiny.answer(params, batch, tiny.make_policy(name))
            continue
        policy = tiny.make_policy(name)
        tiny.check_output(batch, tiny.answer(params, batch, policy), policy)
