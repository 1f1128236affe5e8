"""Cases of the cache that no other default test has; each finds a fault of `tests/mutants.json`."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.slots import TILE
from vlkv import policies
from vlkv.cache.decode_state import begin, group_core
from vlkv.cache.packing import _with_free_slots
from vlkv.compression.sizes import cache_spec


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
