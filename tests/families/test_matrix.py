"""Policies on families: each policy on a second one here, all on all behind a marker; what `select` says of the same.

The first family of every policy is the shipped miniature's, in tests/policies/test_every_method.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.families import tiny
from vlkv import policies

# M-RoPE, no class token; and tiles.
SECOND = {name: "llava_next" if name in ("fastervlm", "hired") else "qwen2_vl" for name in policies.registry}


@pytest.fixture(scope="module")
def made():
    """A model and a batch by family, made once."""
    return {family: (tiny.make_model(family), tiny.make_batch(family)) for family in sorted(set(SECOND.values()))}


def test_no_family_is_forgotten():
    assert set(tiny.FAMILIES) == set(tiny.RAW) == set(tiny.PICTURES)
    for family in tiny.FAMILIES:
        batch = tiny.make_batch(family)
        assert [n > 0 for n in batch.is_vision.sum(axis=1)] == [True, True, False], family
        assert len(set(batch.valid.sum(axis=1))) == 3, family


@pytest.mark.full
@pytest.mark.parametrize("name", SECOND)
def test_every_policy_on_a_second_family(made, name):
    policy = tiny.make_policy(name)
    params, batch = made[SECOND[name]]
    output = tiny.answer(params, batch, policy)
    tiny.check_output(batch, output, policy)


EVERY_STAGE = policies.compose(
    policies.SnapKV(keep=0.5), allocate=policies.PyramidKV, merge=policies.LookM, step=policies.H2O,
    reduce=policies.LightKV(layers=(1,), windows=(2,)), store=policies.KIVI,
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_policy_of_every_stage_on_every_family(family):
    """Reduced in prefill, scored, allotted per layer, merged, quantised, and evicted from while decoding."""
    batch = tiny.make_batch(family)
    tiny.check_output(batch, tiny.answer(tiny.make_model(family), batch, EVERY_STAGE), EVERY_STAGE)


@pytest.fixture(scope="module")
def read(made):
    return jax.jit(vlkv.read_prompt, compiler_options=tiny.QUICK)(*made["qwen2_vl"])


@pytest.mark.full
@pytest.mark.parametrize("name", ["snapkv", "aircache", "prefixkv"])
def test_select_keeps_what_generate_kept(made, read, name):
    """One that scores, one whose layers share by what they scored, one that allots by the layers' statistics."""
    params, batch = made["qwen2_vl"]
    policy = tiny.make_policy(name)
    kept = tiny.answer(params, batch, policy).kept
    select = jax.jit(policies.select, compiler_options=tiny.QUICK)
    assert (np.diff(batch.positions[0][batch.valid[0]], axis=1) != 0).any(), "M-RoPE's axes must differ"
    for row in range(3):
        q, k, v = (jnp.stack([getattr(x, axis)[row].swapaxes(0, 1) for x in read.layers]) for axis in "qkv")
        wanted = select(policy, q, k, v, batch.is_vision[row], batch.valid[row]).kept
        np.testing.assert_array_equal(kept[:, row], wanted)
        assert kept[:, row, :, batch.valid[row]].all() <= (row == 2), "of a prompt with an image something goes"


@pytest.mark.matrix
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_policy_on_every_family(family):
    params, batch = tiny.make_model(family), tiny.make_batch(family)
    for name in policies.registry:
        policy = tiny.make_policy(name)
        tiny.check_output(batch, tiny.answer(params, batch, policy), policy)
