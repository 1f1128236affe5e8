"""Packing, where segments are ragged and longer than what is written at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from pallas_kernels.slots import TILE
from tests import programs
from vlkv import analysis, policies
from vlkv.cache.decode_state import begin, group_core
from vlkv.cache.packing import _with_free_slots, pack
from vlkv.cache.stored import StoredTokens
from vlkv.compression.sizes import cache_spec

ROWS, LAYERS, HEADS, LENGTH, CHANNELS = 2, 3, 4, 70, 8


@pytest.mark.default("32")
@pytest.mark.parametrize("at_a_time", [7, 32])
def test_every_kept_entry_lies_where_its_segment_says_and_nothing_else_does(monkeypatch, at_a_time):
    monkeypatch.setattr("vlkv.cache.packing._SLOTS_AT_A_TIME", at_a_time)
    rng = np.random.default_rng(at_a_time)
    k, v = rng.normal(size=(2, LAYERS, ROWS, HEADS, LENGTH, CHANNELS)).astype(np.float32)
    is_vision = rng.random((ROWS, LENGTH)) < 0.7
    share = np.array([0.1, 0.9, 1.0, 0.0])[:, None]  # heads of one layer keep a little, most, all, nothing
    kept = rng.random((LAYERS, ROWS, HEADS, LENGTH)) < np.stack([share, share[::-1], share / 2])[:, None]
    source = np.stack([np.sort(rng.permutation(500)[:LENGTH]) for _ in range(ROWS)])
    spec = cache_spec(policies.Full(), layers=LAYERS, vision=LENGTH, text=0, images=1, new_tokens=4)
    made = jax.jit(functools.partial(pack, spec))(
        tuple(k), tuple(v), kept, is_vision=np.stack([is_vision] * LAYERS), source=np.stack([source] * LAYERS),
        next_position=np.zeros((ROWS, 1), np.int32),
    )  # fmt: skip
    made = jax.tree.map(np.asarray, made)
    used = np.zeros(made.token.shape, bool)
    for layer in range(LAYERS):
        for row in range(ROWS):
            order = np.argsort(~is_vision[row], kind="stable")  # vision first
            for head in range(HEADS):
                tokens = order[kept[layer, row, head][order]]
                begin = int(made.start[layer, row, head])
                slots = slice(begin, begin + len(tokens))
                assert made.extent[layer, row, head] == len(tokens)
                assert not used[row, head, slots].any()
                used[row, head, slots] = True
                np.testing.assert_array_equal(made.k[row, head, slots], k[layer, row, head, tokens])
                np.testing.assert_array_equal(made.v[row, head, slots], v[layer, row, head, tokens])
                np.testing.assert_array_equal(made.token[row, head, slots], source[row, tokens])
    for pool, free in ((made.k, 0), (made.v, 0), (made.token, -1)):
        assert np.all(np.asarray(pool)[~used] == free)


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


@pytest.mark.parametrize("alike", [True, False])
def test_cores_are_moved_only_if_all_heads_have_the_same(alike):
    length = 3 * TILE
    vision = jnp.arange(length) < length - 1
    state = begin(jnp.ones((2, length), bool), {}, vision, jnp.ones(length, bool), jnp.int32(length - 1), new_tokens=1)
    core = jnp.zeros((2, length), bool).at[:, 2 * TILE].set(True).at[1, 0].set(not alike)
    state = dataclasses.replace(state, core=core)
    state = dataclasses.replace(
        state,
        **{name: getattr(state, name)[None] for name in ("stored", "attended", "is_text", "place", "rank", "core")},
    )
    _, pairs = group_core(state, jnp.array([True]))
    np.testing.assert_array_equal(pairs.number, [1 if alike else 0])


def test_bytes_of_a_pool_whose_lines_have_two_groups():
    """By hand: 64 channels of 4 bits in groups of 32: of keys a scale and a minimum for each channel and 32 slots."""
    spec = cache_spec(policies.KIVI(bits=4, group=32), layers=1, vision=96, text=0, new_tokens=8)
    slots = spec.pool(1)
    assert slots % 32 == 0
    keys = slots * 64 // 2 + slots // 32 * 64 * 2 * 2
    values = slots * 64 // 2 + slots * 2 * 2 * 2
    assert spec.pool_bytes(channels=64, number=2) == keys + values


def test_segments_get_what_is_requested_and_the_upper_layers_less():
    """One row, one column of two heads: [layers, rows, heads]. The entries and one more need 3 + 5, 2 + 2."""
    counts = jnp.array([[[2, 4]], [[1, 1]]])
    requested = jnp.array([[[6, 6]], [[4, 1]]])
    enough = _with_free_slots(counts, requested, 100, 1)
    np.testing.assert_array_equal(enough, [[[6, 6]], [[4, 2]]])
    few = _with_free_slots(counts, requested, 17, 1)  # 5 more than the least: 3 + 1 to the lower layer, 1 to the upper
    np.testing.assert_array_equal(few, [[[6, 6]], [[3, 2]]])
