"""Budgets that differ per head: one column with all segments, as large as the budgets, and the answers of float64."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

import vlkv
from pallas_kernels import core_attention, decode_attention
from tests import programs
from tests.generation.test_decode import kept_entries
from tests.generation.test_step import FORCED, fill_cache, simulated
from tests.uneven import RATIO, Uneven
from vlkv import policies
from vlkv.cache.packing import pack
from vlkv.cache.resizing import resize
from vlkv.compression import budgets
from vlkv.compression.sizes import budget_of, cache_spec

STEPS = 24


@pytest.mark.default("evicts")
@pytest.mark.parametrize("scored", [policies.SnapKV(keep=0.3), policies.H2O(keep=0.3)], ids=["static", "evicts"])
def test_decoding(params, batch, read, tmp_path, scored):
    """Saved, loaded and given more slots on the way."""
    chosen = policies.compose(scored, allocate=Uneven)
    cache, logits = fill_cache(read, chosen, new_tokens=STEPS // 2), []
    wanted = [simulated(params, batch, scored, cache, row, FORCED[row, :STEPS]) for row in range(3)]
    assert cache.token.shape[1] == 1 and cache.start.shape[2] == 2
    counts = np.stack([kept_entries(cache, batch, row).sum(axis=-1) for row in range(3)])
    assert (counts[..., 1] > 5 * counts[..., 0]).all()
    step = programs.decode_step
    for i in range(STEPS):
        if i == STEPS // 2:
            vlkv.save_cache(tmp_path / "cache", params, cache, policy=None)
            cache = resize(vlkv.load_cache(tmp_path / "cache", params), STEPS)
        cache, found = step(params, cache, FORCED[:, i])
        logits.append(found)
    np.testing.assert_allclose(np.stack(logits, axis=1), wanted, atol=1e-4)


def test_a_long_prompt_takes_the_memory_of_its_budgets():
    """8,192 tokens at 10 %: 149 and 1,489 entries per head and layer."""
    layers, heads, tokens, head_dim = 2, 4, 8192, 2
    chosen, random = Uneven(keep=0.1), np.random.default_rng(0)
    total = int(budget_of(chosen, layers=layers, most=tokens, text=tokens).nominal[-1])
    weight = np.broadcast_to(np.where(np.arange(heads) % 2 == 0, 1, RATIO).astype(np.float32), (layers, heads))
    allocate = jax.jit(partial(chosen.allocate, layers=layers))
    each = np.asarray(allocate({"weight": weight}, total=np.int32(total), most=np.full(layers, tokens, np.int32)))
    assert each.sum() == heads * total and each.max() >= 9.9 * each.min()
    kept = np.argsort(random.random((layers, 1, heads, tokens)), axis=-1) < each[:, None, :, None]
    k, v = random.standard_normal((2, layers, 1, heads, tokens, head_dim)).astype(np.float32)
    spec = cache_spec(chosen, layers=layers, vision=0, text=tokens, images=1, new_tokens=1)
    cache = jax.jit(partial(pack, spec))(
        tuple(k), tuple(v), kept, is_vision=np.zeros((layers, 1, tokens), bool),
        source=np.broadcast_to(np.arange(tokens), (layers, 1, tokens)), next_position=np.full((1, 1), tokens),
    )  # fmt: skip
    budget = each.sum() * head_dim * 4
    assert budget <= cache.k.nbytes <= 1.05 * budget
    assert cache.slots == spec.allocated()
    for layer, head in np.ndindex(layers, heads):
        begin, count = int(np.asarray(cache.start)[layer, 0, head]), each[layer, head]
        assert np.asarray(cache.extent)[layer, 0, head] == count
        for pool, values in ((cache.k, k), (cache.v, v)):
            held = np.asarray(pool)[0, 0, begin : begin + count]
            np.testing.assert_array_equal(held, values[layer, 0, head, kept[layer, 0, head]])


def test_budgets_of_another_shape_are_refused():
    q = np.random.default_rng(0).standard_normal((2, 4, 30, 8)).astype(np.float32)

    class Flat(Uneven):
        def allocate(self, statistics, *, total, most, layers):
            return budgets.uniform(total, most)

    with pytest.raises(vlkv.InputError, match="per layer and key head"):
        programs.select(Flat(keep=0.1), q, q, q, np.zeros(30, bool))


NAMES = ("xla", "reference", "triton:interpret", "mosaic_tpu:interpret")


@pytest.mark.default("whole-xla")
@pytest.mark.ci("whole-xla", "listed-xla", "whole-triton", "listed-mosaic")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("listed", [False, True], ids=["whole", "listed"])
def test_ops_on_one_column(name, listed):
    """The results are those on a pool of one column per head with the same entries. Lengths are 0 to 150."""
    random, most, heads = np.random.default_rng(0), 160, 3
    length = np.array([[5, 150, 33], [0, 16, 131]])
    rounded = -(-length // 16) * 16
    start = np.cumsum(rounded, axis=1) - rounded
    q = random.standard_normal((2, 2 * heads, 64)).astype(np.float32)
    column = random.standard_normal((2, 2, 1, 240, 64)).astype(np.float32)
    wide = np.zeros((2, 2, heads, most, 64), np.float32)
    for b, head in np.ndindex(2, heads):
        wide[:, b, head, : length[b, head]] = column[:, b, 0, start[b, head] : start[b, head] + length[b, head]]
    valid = random.random((2, heads, most)) < 0.7
    op, more = decode_attention, ()
    if listed:
        text = np.minimum(length, 4)
        op, more = core_attention, (np.array([[0, 1, 3], [0, 1, 2]]), np.array([3, 0]), text)
    options = {"max_length": most, "return_mass": True}

    def run(arrays, start, name):
        made = jax.jit(partial(op, **options, implementation=name))
        return made(q, *arrays, start, length, *more, valid=valid)

    for got, wanted in zip(run(column, start, name), run(wide, 0 * start, "reference"), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
