"""What a layer's attention measures in passing gives the same cache as measuring it afterwards.

If `read_prompt` does not get the policy, `fill_cache` measures afterwards; that way is tested against float64.
"""

import jax
import pytest

import vlkv
from tests import models, programs
from vlkv import policies

pytestmark = pytest.mark.usefixtures("shapes_for_arrays")

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


@pytest.mark.default("squares")
@pytest.mark.ci("squares", "rows", "one method twice")
@pytest.mark.parametrize("name", POLICIES)
def test_measuring_in_passing_changes_nothing(params, batch, read, name):
    policy = POLICIES[name]
    assert policies.slots_of(policy).measuring
    if name == "squares":
        assert "attention_mass" not in str(programs.prefill.trace(params, batch, policy, new_tokens=8).jaxpr)
    cache, _ = programs.prefill(params, batch, policy, new_tokens=8)
    models.same(cache, programs.fill_cache(read, policy, new_tokens=8), atol=1e-5)


def test_sums_of_all_rows_need_no_second_pass(params, batch, read):
    policy = POLICIES["sums"]
    asked = jax.eval_shape(
        lambda params: vlkv.read_prompt(params, batch, observers=(POLICIES["squares"], policy)), params
    )
    fill = jax.jit(lambda prompt: vlkv.fill_cache(prompt, policy, new_tokens=8))
    for prompt, found in ((asked, False), (read, True)):
        assert ("attention_mass" in str(fill.trace(prompt).jaxpr)) == found
