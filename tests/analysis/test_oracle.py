"""The oracle's cache, and the share of the evidence that a cache holds."""

import jax
import numpy as np
import pytest

from tests import programs
from tests.models import tiny_llava, unequal_batch
from vlkv import analysis, policies
from vlkv.compression.compose import at_keep
from vlkv.compression.sizes import budget_of
from vlkv.tools.evaluation.keeps import budget, share_programs

KEEP = 0.2  # of 50, 25 and 0 vision tokens in 3 layers: 30, 15 and 0 entries


evidence_recall, select = jax.jit(analysis.evidence_recall), jax.jit(policies.select)
held_by_head = jax.jit(analysis.held_by_head, static_argnums=1)


@pytest.fixture(scope="module")
def inputs():
    return unequal_batch(padding="left")


@pytest.fixture(scope="module")
def prompt(inputs):
    return programs.read_prompt(tiny_llava(), inputs)


def evidence(inputs, *places):
    """[B, T]: the vision tokens with these numbers in their row."""
    number = np.cumsum(inputs.is_vision, axis=1) - 1
    return np.stack([np.isin(n, p) & v for n, p, v in zip(number, places, inputs.is_vision, strict=True)])


def test_the_evidence_then_random_tokens_then_all_text(inputs, prompt):
    wanted = evidence(inputs, [0, 30, 49], [7], [])
    run = jax.jit(analysis.oracle_cache, static_argnames="new_tokens")
    first, second = (
        run(prompt, wanted, policies.ImgRandom(keep=KEEP), new_tokens=1, key=jax.random.key(seed)) for seed in (0, 1)
    )
    held, other = (np.asarray(held_by_head(c, inputs.valid.shape[1])) for c in (first, second))
    vision = held & inputs.is_vision[:, None, None]
    assert vision.sum(-1)[:, :, 0].tolist() == [[10] * 3, [5] * 3, [0] * 3]
    assert (vision.sum(-1)[:, :, 0] == vision.sum(-1)[:, :, 1]).all()
    assert (held >= wanted[:, None, None]).all()
    text = inputs.valid & ~inputs.is_vision
    np.testing.assert_array_equal(
        held & ~inputs.is_vision[:, None, None], np.broadcast_to(text[:, None, None], held.shape)
    )
    assert not np.array_equal(held, other), "the rest is random"
    assert not np.array_equal(held[0, 0], held[0, 1]), "in every layer anew"
    np.testing.assert_array_equal(evidence_recall(first, wanted)[:2], np.ones((2, 3, 2)))


def test_a_smaller_budget_in_the_memory_of_a_larger(inputs, prompt):
    """Three entries in all: one in each layer, the first of the evidence or another of it."""
    policy, wanted = policies.ImgRandom(keep=KEEP), evidence(inputs, [3, 4], [3, 4], [])
    few = budget_of(policies.ImgRandom(budget=1), layers=3, most=inputs.valid.shape[1], text=inputs.max_text)
    cache = jax.jit(analysis.oracle_cache, static_argnames="new_tokens")(
        prompt, wanted, policy, few, new_tokens=1, key=jax.random.key(0)
    )
    np.testing.assert_array_equal(evidence_recall(cache, wanted)[:2], np.full((2, 3, 2), 0.5))


@pytest.mark.default("SnapKV")
@pytest.mark.parametrize(
    "policy", [policies.SnapKV(keep=0.4, scope="vision"), policies.H2O(keep=0.4, scope="vision")], ids=repr
)
def test_recall_is_a_count_of_what_select_keeps(inputs, prompt, policy):
    wanted = evidence(inputs, [1, 2, 26, 40], [0, 24], [])
    cache = programs.fill_cache(prompt, policy, new_tokens=1)
    recall = np.asarray(evidence_recall(cache, wanted))
    for row in range(2):
        q, k, v = (np.stack([np.asarray(getattr(x, n))[row] for x in prompt.layers]) for n in "qkv")
        kept = np.asarray(select(policy, q, k, v, inputs.is_vision[row], inputs.valid[row]).kept)
        np.testing.assert_allclose(recall[row], kept[:, :, wanted[row]].mean(axis=-1), rtol=1e-6)


TEXT = policies.AirCache(keep=0.5, window="text")
COMPOSED = policies.compose(TEXT, allocate=policies.PrefixKV, smooth=policies.Smooth(3))


def test_policies_that_differ_in_keep_share_a_program():
    plan = [at_keep(policy, keep) for policy in (TEXT, COMPOSED) for keep in (0.1, 0.5)]
    assert share_programs(plan) == [plan[i] for i in (1, 1, 3, 3)]


def test_policies_whose_program_depends_on_keep_share_none():
    """CSP uses an ordinary softmax if it keeps everything, and ToMe needs more rounds for a smaller keep."""
    plan = [policies.CSP(keep=0.5), policies.CSP(keep=1.0)]
    plan += [policies.ToMe(keep=keep, on="cache") for keep in (0.3, 0.5)]
    assert share_programs(plan) == plan


@pytest.mark.parametrize("policy", [TEXT, COMPOSED, policies.CSP(keep=0.5)], ids=lambda policy: type(policy).__name__)
@pytest.mark.full
def test_one_program_for_every_keep(inputs, prompt, policy):
    """A table of a smaller keep in the program of a larger one keeps what the smaller one keeps by itself."""
    length, less = inputs.valid.shape[1], at_keep(policy, 0.1)
    table = budget(less, policy, prompt)
    got = programs.fill_cache_with(prompt, policy, table, new_tokens=1)
    want = programs.fill_cache(prompt, less, new_tokens=1)
    np.testing.assert_array_equal(*(held_by_head(cache, length) for cache in (got, want)))
