"""What a layer's attention measures in passing gives the same cache as measuring it afterwards.

If `read_prompt` does not get the policy, `fill_cache` measures afterwards; that way is tested against float64.
"""

import jax
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.models import padded, tiny_llava
from vlkv import policies

COMMON = dict(keep=0.4, scope="all")
POLICIES = {
    "sums": policies.H2O(**COMMON),
    "squares": policies.RoCo(**COMMON),
    "merging": policies.LookM(**COMMON),
    "counts": policies.VLCache(**COMMON),
    "rows that depend on the layer": policies.AirCache(**COMMON),
    "one measure of two methods": policies.compose(policies.H2O(**COMMON), allocate=policies.PrefixKV),
    "one method twice": policies.compose(
        policies.VLCache(threshold=0.3, **COMMON), allocate=policies.VLCache(**COMMON), step=policies.RoCo
    ),
}

prefill, fill = (jax.jit(f, static_argnames="new_tokens") for f in (vlkv.prefill, vlkv.fill_cache))


@pytest.fixture(scope="module")
def prompt():
    """Without images, so that all rows observe; of unequal lengths."""
    rng = np.random.default_rng(0)
    params, rows = tiny_llava(), [rng.integers(6, 50, count) for count in (40, 23, 6)]
    inputs = vlkv.Inputs.from_hf(padded(rows, ["left", "right", "left"]), params.config)
    return params, inputs, programs.read_prompt(params, inputs)


def same(ours, theirs):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=1e-5, atol=1e-5)


@pytest.mark.default("squares")
@pytest.mark.parametrize("name", POLICIES)
def test_measuring_in_passing_changes_nothing(prompt, name):
    params, inputs, read = prompt
    policy = POLICIES[name]
    cache, _ = prefill(params, inputs, policy, new_tokens=4)
    later = fill(read, policy, new_tokens=4)
    assert policy.facts.measures is not None
    same(cache, later)


def test_sums_of_all_rows_need_no_second_pass(prompt):
    params, inputs, read = prompt
    policy = POLICIES["sums"]
    asked = programs.read_prompt(params, inputs, observers=(POLICIES["squares"], policy))
    assert "attention_mass" not in str(jax.make_jaxpr(lambda x: vlkv.fill_cache(x, policy, new_tokens=4))(asked))
    same(fill(asked, policy, new_tokens=4), fill(read, policy, new_tokens=4))
    assert "attention_mass" not in str(jax.make_jaxpr(lambda x: vlkv.prefill(params, x, policy, new_tokens=4))(inputs))
    assert "attention_mass" in str(jax.make_jaxpr(lambda x: vlkv.fill_cache(x, policy, new_tokens=4))(read))
