"""`output.kept`: the prompt tokens that each layer and key head keeps, against `select` and by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from vlkv import analysis, policies
from vlkv.cache.stored import StoredTokens


def test_a_policy_that_reduces_the_prompt(params, batch):
    """FastV drops in the second layer and later what the last token attends to least, in all heads alike."""
    prompt = programs.read_prompt(params, batch, policies.FastV(keep=0.3, layer=1))
    cache = programs.fill_cache(prompt, policies.FastV(keep=0.3, layer=1), new_tokens=8)
    kept = StoredTokens.of(cache, batch.valid.shape[1]).mask()
    np.testing.assert_array_equal(kept[0], np.broadcast_to(batch.valid[:, None], kept[0].shape))
    later, vision = kept[1:], batch.is_vision[:, None]
    assert (later == later[:1, :, :1]).all() and not (later & ~batch.valid[:, None]).any()
    assert (later | vision | ~batch.valid[:, None]).all(), "all text stays"
    assert (later & vision).sum(-1)[0, :, 0].tolist() == [15, 8, 0], "of 50, 25 and 0 vision tokens"
    np.testing.assert_array_equal(kept[:, :, 0].swapaxes(0, 1), jax.jit(analysis.reached)(prompt))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_pool_by_hand(parts):
    """Two layers, one row, two heads in one column of 8 slots; in two parts, every second entry is in the second."""
    token = {1: [4, 0, 2, -1, 1, 3, -1, -1], 2: [4, 2, 1, -1, 0, -1, 3, -1]}[parts]
    start = {1: [[[0, 2]], [[4, 6]]], 2: [[[0, 1]], [[2, 3]]]}[parts]
    token, start, counts = (jnp.array(x) for x in ([[token]], start, [[[2, 1]], [[2, 0]]]))
    stored = StoredTokens(token=token, start=start, counts=counts, parts=parts, prompt=5)
    kept = [[[sorted(np.flatnonzero(head).tolist()) for head in row] for row in layer] for layer in stored.mask()]
    assert kept == [[[[0, 4], [2]]], [[[1, 3], []]]]


def test_it_is_made_on_the_host(params, batch):
    with pytest.raises(vlkv.InputError, match="outside jit"):
        jax.eval_shape(lambda p: vlkv.generate(p, batch, sampling=vlkv.Greedy(max_new_tokens=2)).kept, params)
