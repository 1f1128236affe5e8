"""Integer budgets: exact totals, and examples that a reader can do by hand."""

import itertools
import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vlkv
from pallas_kernels import core_attention, decode_attention
from tests import programs
from tests.generation.test_decode import kept_entries
from tests.generation.test_step import FORCED, fill_cache, simulated
from tests.models import RATIO, Uneven
from vlkv import policies
from vlkv.cache.packing import pack
from vlkv.cache.resizing import resize
from vlkv.compression import budgets
from vlkv.compression.sizes import budget_of, cache_spec
from vlkv.masks import top

LAYERS, LENGTH = 4, 5  # one shape each, so that jit compiles once
few = settings(max_examples=40, deadline=None, derandomize=True)
apportion = jax.jit(lambda real, total, floor, ceiling: budgets.apportion(real, total, floor=floor, ceiling=ceiling))
smallest, uniform = jax.jit(budgets.smallest), jax.jit(budgets.uniform)


def totals(keep, budget, *, layers, most):
    """For 0..most tokens in every layer."""
    return budgets.total(keep, budget, layers * np.arange(most + 1), layers=layers)


def whole(*values):
    return tuple(np.int32(v) for v in values)


# --- totals and uniform ---------------------------------------------------------------------------------------------


@few
@given(st.integers(1, 64), st.integers(1, 6), st.integers(1, 50))
def test_totals_round_the_whole_half_up_and_keep_one_per_layer_and_no_more_than_there_are(part, layers, budget):
    counts = layers * np.arange(40)
    half_up = [math.floor(Fraction(part, 64) * int(n) + Fraction(1, 2)) for n in counts]
    got = budgets.total(part / 64, None, counts, layers=layers)
    np.testing.assert_array_equal(got, np.minimum(counts, np.maximum(layers, half_up)))
    got = budgets.total(None, budget, counts, layers=layers)
    np.testing.assert_array_equal(got, np.minimum(counts, layers * budget))


def test_totals_at_7b_size_are_the_fraction_to_the_integer():
    assert totals(0.1, None, layers=28, most=8192)[-1] == 22938  # 22937.6
    assert totals(0.1, None, layers=32, most=576)[-1] == 1843  # 1843.2


def test_uniform_gives_what_is_left_over_to_the_lower_layers():
    """Layers that hold less get the same share of it."""
    for total, most, expected in (
        (11, [9] * 4, [3, 3, 3, 2]),
        (8, [9] * 4, [2, 2, 2, 2]),
        (0, [0] * 4, [0, 0, 0, 0]),
        (15, [16, 8, 4, 2], [8, 4, 2, 1]),
    ):
        np.testing.assert_array_equal(uniform(np.int32(total), np.array(most, np.int32)), expected)


def test_fractions_are_rounded_half_up_and_leave_at_least_one():
    np.testing.assert_array_equal(budgets.fraction(0.5, 5), [0, 1, 1, 2, 2, 3])
    np.testing.assert_array_equal(budgets.fraction(0.1, 5), [0, 1, 1, 1, 1, 1])


def test_totals_of_sums_of_equal_layers_are_totals():
    sums = budgets.total(0.3, None, np.arange(22), layers=3)
    np.testing.assert_array_equal(sums[::3], totals(0.3, None, layers=3, most=7))
    assert sums[1] == 1 and sums[2] == 2  # no more than there are


# --- apportion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("real", "total", "floor", "ceiling", "expected"),
    [
        ([1.5, 2.25, 3.25, 3.0], 10, 1, 9, [2, 2, 3, 3]),  # largest remainder
        ([2.5, 2.5, 2.5, 2.5], 10, 1, 9, [3, 3, 2, 2]),  # ties to the lower layer
        ([2.4999, 2.5001, 2.4999, 2.5001], 10, 1, 9, [3, 3, 2, 2]),  # rounding does not decide between equal shares
        ([8.0, 2.0, 1.0, 1.0], 12, 1, 6, [6, 3, 2, 1]),  # 2 too many become 3, 1.5, 1.5
        ([0.0, 4.0, 4.0, 4.0], 12, 1, 9, [1, 4, 4, 3]),  # one missing is taken from all others alike
        ([0.0, 0.0, 0.0, 20.0], 20, 1, 9, [4, 4, 3, 9]),  # nothing to share in proportion to
        ([1.0, 1.0, 1.0, 1.0], 0, 0, 0, [0, 0, 0, 0]),
        ([9.0, 1.0, 5.0, 3.0], 20, 1, 5, [5, 5, 5, 5]),
        ([9.0, 1.0, 5.0, 3.0], 4, 1, 5, [1, 1, 1, 1]),
        ([np.nan, 1.0, 5.0, 3.0], 9, 1, 5, [3, 2, 2, 2]),  # ends, and exactly
        ([9.0, 1.0, 5.0, 3.0], 21, 1, 5, [5, 5, 5, 5]),  # more than the bounds allow
        ([9.0, 1.0, 5.0, 3.0], 3, 1, 5, [1, 1, 1, 1]),  # less
        ([9.0, 1.0, 5.0, 3.0], 9, 7, 5, [5, 5, 5, 5]),  # bounds that contradict each other: the ceiling holds
    ],
)
def test_apportion_by_hand(real, total, floor, ceiling, expected):
    got = apportion(np.array(real, np.float32), *whole(total, floor, ceiling))
    np.testing.assert_array_equal(got, expected)


@few
@given(
    st.lists(st.floats(0, 40, width=32), min_size=LAYERS, max_size=LAYERS),
    st.integers(1, 20),
    st.data(),
)
def test_apportion_sums_exactly_within_bounds_and_keeps_the_order(real, ceiling, data):
    total = data.draw(st.integers(LAYERS, LAYERS * ceiling))
    got = np.asarray(apportion(np.array(real, np.float32), *whole(total, 1, ceiling)))
    assert got.sum() == total and got.min() >= 1 and got.max() <= ceiling
    order = np.argsort(real, kind="stable")
    assert (np.diff(got[order]) >= -1).all()


@few
@given(st.lists(st.integers(1, 60), min_size=LAYERS, max_size=LAYERS), st.integers(4, 60))
def test_apportion_inside_the_bounds_is_within_one_of_the_real_share(weights, total):
    real = np.array(weights) / sum(weights) * total
    got = np.asarray(apportion(real.astype(np.float32), *whole(total, 0, 1000)))
    assert got.sum() == total
    assert np.abs(got - real).max() < 1 + 1e-4


# --- smallest -------------------------------------------------------------------------------------------------------


def smallest_by_force(values, total):
    ranked = sorted(itertools.product(range(LAYERS), range(LENGTH)), key=lambda at: (values[at], at[0]))
    return [sum(layer == i for layer, _ in ranked[:total]) for i in range(LAYERS)]


value = st.one_of(
    st.sampled_from([0.0, -0.0, 0.25, 1.0, float(np.nextafter(np.float32(1), np.float32(2))), 1e-38, 3e38]),
    st.floats(0, 1, width=32, allow_subnormal=False),
)


@few
@given(
    st.lists(st.lists(value, min_size=LENGTH, max_size=LENGTH), min_size=LAYERS, max_size=LAYERS),
    st.integers(0, LAYERS * LENGTH),
)
def test_smallest_is_what_sorting_finds_with_ties_to_the_lower_layer(rows, total):
    values = np.array(rows, np.float32)
    np.testing.assert_array_equal(smallest(values, np.int32(total)), smallest_by_force(values, total))


def test_smallest_never_counts_infinity():
    values = np.full((LAYERS, LENGTH), np.inf, np.float32)
    values[1, 2], values[3, 0] = 5, 7
    for total, expected in [(0, [0, 0, 0, 0]), (1, [0, 1, 0, 0]), (2, [0, 1, 0, 1]), (9, [0, 1, 0, 1])]:
        np.testing.assert_array_equal(smallest(values, np.int32(total)), expected)


# --- top -----------------------------------------------------------------------------------------------------------

NASTY = np.array([-np.inf, -1e30, -3.0, -0.0, 0.0, 1e-30, 2.0, 5.5, 5.5, np.inf, np.nan], np.float32)


def best(x, candidates, count):
    """One head: candidates by falling value, then by place."""
    places = sorted(np.flatnonzero(candidates), key=lambda i: (-x[i], i))
    return np.isin(np.arange(len(x)), places[: max(count, 0)])


def test_the_best_of_each_head():
    """Against numpy's stable sort, with ties, both zeros, infinities and what is no number."""
    rng, run = np.random.default_rng(0), jax.jit(top)
    for draw in range(60):
        x = rng.choice(NASTY, (4, 37)) if draw % 2 else rng.normal(size=(4, 37)).astype(np.float32)
        candidates = rng.random((4, 37)) < rng.choice([0.0, 0.1, 0.6, 1.0])
        count = rng.integers(-1, 37 + 5, 4)
        numbers = np.where(np.isnan(x), -np.inf, x)
        expected = [best(*head) for head in zip(numbers, candidates, count, strict=True)]
        np.testing.assert_array_equal(run(jnp.asarray(x), jnp.asarray(candidates), jnp.asarray(count)), expected)


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


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "scope"), [(policies.AirCache, "vision"), (policies.PrefixKV, "all"), (policies.VLCache, "all")]
)
def test_the_entries_of_a_short_list_that_is_long_enough_are_the_same(read, batch, method, scope):
    exact, capped = (
        programs.fill_cache(read, method(keep=0.4, scope=scope, cap=cap), new_tokens=1) for cap in (None, 2.5)
    )
    np.testing.assert_array_equal(exact.counts, capped.counts)
    for row in range(3):
        np.testing.assert_array_equal(kept_entries(exact, batch, row), kept_entries(capped, batch, row))
