"""Packing, where segments are ragged and longer than what is written at a time."""

import functools

import jax
import numpy as np
import pytest

from vlkv import policies
from vlkv.cache.packing import pack
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
