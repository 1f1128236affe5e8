"""A decoder that mixes full attention and sliding windows: what policies count, and what the rings contain."""

import dataclasses

import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.generation.test_decode import kept_entries
from tests.generation.test_prompt import by_last_row, check, row_of
from tests.models import CONFIG, random_model, unequal_batch
from tests.policies import numpy_policies
from vlkv import policies

WINDOW, NEW = 12, 10
SLIDES = (WINDOW, None, WINDOW, None)
DECODER = dataclasses.replace(CONFIG.decoder, layers=4, windows=SLIDES)
prefill = programs.prefill


@pytest.fixture(scope="module")
def params():
    return random_model(dataclasses.replace(CONFIG, decoder=DECODER))


@pytest.fixture(scope="module")
def batch():
    return unequal_batch(padding="left")


def full(x):
    """The layers with full attention."""
    return [one for one, window in zip(x, SLIDES, strict=True) if window is None]


def test_snapkv_scores_and_counts_the_full_layers(params, batch):
    policy = policies.SnapKV(keep=0.3, window=4, scope="all")
    cache, logits = prefill(params, batch, policy, new_tokens=NEW)
    for row in range(3):
        x, is_vision = row_of(params, batch, row)
        first, layers = reference.prefill(params.decoder, x)
        q, k = (np.stack([np.swapaxes(one[i], 0, 1) for one in full(layers)]) for i in (0, 1))
        kept, _, _ = numpy_policies.snapkv(numpy_policies.Prompt(q, k, is_vision, "all", keep=0.3), window=4)
        np.testing.assert_array_equal(kept_entries(cache, batch, row), kept)
        np.testing.assert_allclose(logits[row], first, atol=1e-4)
    c, rows = DECODER, 3
    assert vlkv.pool_slots(params, batch, policy, new_tokens=NEW) == cache.slots
    numbers = 2 * rows * cache.slots * c.kv_heads * c.head_dim
    tables = cache.token.size + sum(ring.place.size for ring in cache.rings.layers)
    assert cache.bytes == 4 * (numbers + tables)
    assert [ring.slots for ring in cache.rings.layers] == [WINDOW, WINDOW]


def test_a_reduction_follows_a_full_layer_and_windows_count_dropped_tokens(params, batch):
    check(params, batch, policies.FastV(keep=0.3, layer=1), lambda is_vision: {1: by_last_row(is_vision, 0.3)})


WORDS = np.random.default_rng(5).integers(6, 50, (3, 60))


def turn(counts, padding: str, starts=(0, 0, 0)) -> vlkv.Inputs:
    """Tokens of `WORDS`: a number for each row, and where they start."""
    longest = max(counts)
    ids, mask = np.zeros((2, 3, longest), int)
    for row, (count, start) in enumerate(zip(counts, starts, strict=True)):
        at = slice(longest - count, None) if padding == "left" else slice(count)
        ids[row, at], mask[row, at] = WORDS[row, start : start + count], 1
    return vlkv.Inputs.from_hf({"input_ids": ids, "attention_mask": mask}, CONFIG)


@pytest.mark.full
def test_turns_that_are_longer_than_the_window_continue_as_one_prompt(params, tmp_path):
    """The cache is saved, loaded and made larger after the first turn."""
    ends = np.array([5, 4, 2])
    cache, _ = prefill(params, turn(ends, "left"), policies.Full(), new_tokens=4)
    assert [ring.slots for ring in cache.rings.layers] == [WINDOW, WINDOW]
    vlkv.save_cache(tmp_path / "cache", params, cache)
    cache = vlkv.load_cache(tmp_path / "cache", params, new_tokens=60)
    extend = programs.extend
    for counts, padding in (((20, 15, 2), "right"), ((7, 1, 7), "left"), ((1, 2, 18), "left")):
        cache, logits = extend(params, cache, turn(counts, padding, ends))
        ends += counts
    whole = np.asarray(programs.forward(params, turn(ends, "right")))
    np.testing.assert_allclose(logits, whole[np.arange(3), ends - 1], atol=1e-4)
