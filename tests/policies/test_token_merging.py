"""ToMe, PiToMe and ToFu as policies: published vectors, numpy from the equations, and what they leave."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.policies.arrays import observation, tokens_of
from tests.policies.test_golden import pairs, same_rows
from vlkv.buckets import Buckets
from vlkv.compression import matching
from vlkv.compression.candidates import compress
from vlkv.compression.sizes import vision_bounds
from vlkv.policies.lightkv import LightKV
from vlkv.policies.pitome import PiToMe
from vlkv.policies.tofu import ToFu
from vlkv.policies.tome import ToMe

_reduce = jax.jit(lambda policy, tokens, obs, stage: policy.reduce(tokens, obs, stage=stage), static_argnums=3)
prefill = programs.prefill


def reduce(policy, x, keys, is_vision=None, *, valid=None, size=None, lone=(), stage=0):
    """Hidden states, sizes and who is kept; keys [K, T, H]; `lone` tokens lie on no grid."""
    length = len(x)
    is_vision, valid = (np.ones(length, bool) if mask is None else mask for mask in (is_vision, valid))
    grid = np.repeat(np.where(is_vision, 0, -1)[:, None], 3, axis=1)
    grid[list(lone), 1:] = -1
    tokens = tokens_of(
        x, grid, is_vision, valid, positions=np.arange(length)[:, None], size=np.ones(length) if size is None else size
    )
    obs = observation(tokens, keys, keys)
    made, kept = jax.tree.map(np.asarray, _reduce(policy, tokens, obs, stage))
    np.testing.assert_array_equal(made.positions[:, 0], np.arange(length))
    return made.x, made.size, kept


# --- published vectors -----------------------------------------------------------------------------------------------


def check_published(g, policy, name, lone=()):
    """`name` has a {} where that of the tokens and that of their sizes differ."""
    names = [name.format(what) for what in ("tokens", "sizes")] if "{" in name else [name]
    size = g["token_sizes"][:, 0] if len(names) > 1 else None
    *made, kept = reduce(policy, g["tokens"], g["metric"][None], size=size, lone=lone)
    same_rows(np.column_stack(made[: len(names)])[kept], np.column_stack([g[name] for name in names]))


def test_golden_tome(golden):
    g = golden("token_merging")
    for i in range(len(g["tome_merge_counts"])):
        name = f"as_released_tome_{{}}_class0_count{i}"
        check_published(g, ToMe(keep=len(g[name.format("tokens")]) / len(g["tokens"]), layers=(1,)), name)


@pytest.mark.parametrize("class_token", [0, 1])
def test_golden_pitome(golden, class_token):
    g = golden("token_merging")
    for r, m in pairs(g["keep_ratios"], g["pitome_margins"]):
        name = f"as_released_pitome_{{}}_class{class_token}_ratio{r}_margin{m}"
        keep = (len(g[name.format("tokens")]) - class_token) / (len(g["tokens"]) - class_token)
        policy = PiToMe(keep=keep, layers=(1,), margin=float(g["pitome_margins"][m]))
        check_published(g, policy, name, lone=range(class_token))


@pytest.mark.parametrize("mode", ["tofu", "prune", "mean", "amax"])
def test_golden_tofu(golden, mode):
    g = golden("token_merging")
    for i in range(len(g["keep_ratios"])):
        name = f"as_released_tofu_{mode}_class0_ratio{i}"
        keep = len(g[name]) / len(g["tokens"])
        check_published(g, ToFu(keep=keep, layers=(1,), mode=mode, pruning=0, variant="released"), name)


# --- from the equations ----------------------------------------------------------------------------------------------


def targets(keys, members, removed, margin=None):
    """Where members go (-1: nowhere): the closest even ones, or every second of the most energetic, by mean keys."""
    metric = np.float64(keys).mean(axis=0)
    metric /= np.maximum(np.linalg.norm(metric, axis=1, keepdims=True), 1e-12)
    likeness, order = metric @ metric.T, np.flatnonzero(members)
    if margin is not None:
        energy = np.where(likeness > margin, likeness - margin, np.expm1(likeness - margin))[:, members].mean(axis=1)
        order = order[np.argsort(-energy[order], kind="stable")][: 2 * removed]
    a, b, target = order[::2], order[1::2], np.full(len(members), -1)
    if removed:
        cosine = likeness[np.ix_(a, b)]
        first = np.argsort(-cosine.max(axis=1), kind="stable")[:removed]
        target[a[first]] = b[cosine.argmax(axis=1)[first]]
    return target


def folded(mode, x, size):
    """What several vectors become; the first is that which stays."""
    norms, mean = np.linalg.norm(x, axis=1), x.mean(axis=0)
    return {
        "tome": lambda: np.average(x, axis=0, weights=size),
        "mean": lambda: mean,
        "amax": lambda: x.max(axis=0),
        "paper": lambda: mean / np.linalg.norm(mean) * norms.max(),
        "released": lambda: mean / norms[0] * norms.max(),
    }["tome" if mode == "pitome" else mode]()


MODES = {
    "tome": ToMe(keep=0.36, layers=(1, 2)),
    "pitome": PiToMe(keep=0.36, layers=(1, 2), margin=(0.3, 0.1)),
    "early": ToFu(keep=0.36, layers=(1, 2)),
    **{variant: ToFu(keep=0.36, layers=(1, 2), variant=variant) for variant in ("paper", "released")},
    **{mode: ToFu(keep=0.36, layers=(1, 2), mode=mode) for mode in ("mean", "amax", "prune")},
}


@pytest.mark.parametrize("pad", [(6, 0), (0, 6)], ids=["left padded", "right padded"])
@pytest.mark.parametrize("mode", MODES)
def test_merging_agrees_with_the_equations(pad, mode):
    """30 tokens, 19 of them vision, one of those on no grid, and 6 of padding; in the last stage, or in the first."""
    random, place, lone = np.random.default_rng(11), np.arange(36), pad[0] + 4
    x, size = random.standard_normal((36, 12)).astype(np.float32), random.integers(1, 5, 36).astype(np.float32)
    keys = random.standard_normal((2, 36, 8)).astype(np.float32)
    vision, valid = (place >= lone) & (place < lone + 19), np.pad(np.ones(30, bool), pad)
    stage = int(mode != "early")
    got, sizes, kept = reduce(MODES[mode], x, keys, vision, valid=valid, size=size, lone=[lone], stage=stage)
    # The root of 0.36 is 0.6: 10.8 of 18.
    target = targets(keys, vision & (place != lone), 18 - 11, 0.1 if mode == "pitome" else None)
    np.testing.assert_array_equal(kept, valid & (target < 0))
    for j in np.flatnonzero(kept):
        some = [j, *np.flatnonzero(target == j)]
        if mode in ("prune", "early"):
            some = some[:1]
        want = x[j] if len(some) == 1 else folded(mode, np.float64(x[some]), size[some])
        np.testing.assert_allclose(got[j], want, rtol=1e-5, atol=1e-5)
        assert sizes[j] == size[some].sum()


@pytest.mark.full
@pytest.mark.parametrize(("method", "mode"), [(ToMe, "tome"), (PiToMe, "pitome"), (ToFu, "paper")])
def test_on_the_cache_rounds_go_on_until_the_budget_is_met(method, mode):
    random, layers, length = np.random.default_rng(7), 3, 40
    q, k, v = (random.standard_normal((layers, heads, length, 8)).astype(np.float32) for heads in (4, 2, 2))
    vision, valid = (np.arange(length) >= 5) & (np.arange(length) < 30), np.arange(length) < 37
    *got, selection = jax.jit(compress)(method(keep=0.3, on="cache"), q, k, v, vision, valid)
    kept_by, budgets = (np.asarray(x) for x in (selection.kept, selection.budgets[:, 0]))
    assert budgets.sum() == math.floor(0.3 * layers * 25 + 0.5)
    for layer in range(layers):
        stored, members, size = np.float64([k[layer], v[layer]]), vision.copy(), np.ones(length)
        for number, margin in enumerate((0.675, 0.45, 0.225)):
            removed = min(members.sum() // 2, members.sum() - budgets[layer])
            target = targets(stored[0], members, removed, margin if mode == "pitome" else None)
            before, sizes = stored.copy(), size.copy()
            for j in set(target[target >= 0]) if mode != "paper" or number else ():
                some = [j, *np.flatnonzero(target == j)]
                for part, head in np.ndindex(2, 2):
                    stored[part, head, j] = folded(mode, before[part, head][some], sizes[some])
                size[j] = sizes[some].sum()
            members &= target < 0
        for head, kept in enumerate(kept_by[layer]):
            np.testing.assert_array_equal(kept, members | (valid & ~vision))
            for ours, wanted in zip(got, stored, strict=True):
                np.testing.assert_allclose(ours[layer, head][kept], wanted[head, kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [ToMe, PiToMe, ToFu])
def test_exact_counts_for_few_and_no_vision_tokens(method):
    random = np.random.default_rng(2)
    x = random.standard_normal((12, 4)).astype(np.float32)
    keys = random.standard_normal((1, 12, 4)).astype(np.float32)
    policy = method(keep=0.5, layers=(1,))
    for count in (0, 1, 2, 3, 12):
        got, _, kept = reduce(policy, x, keys, np.arange(12) < count)
        assert kept[count:].all() and kept[:count].sum() == (count + 1) // 2
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got[count:], x[count:])


def test_the_bound_holds_with_and_without_class_tokens():
    policy = ToMe(keep=0.3, layers=(1, 2))
    for vision in range(60):
        for images in range(1, 4):
            for lone in range(min(images, vision) + 1):
                n = vision - lone
                left = lone + max(min(n, 1), math.floor(math.sqrt(0.3) * n + 0.5))
                assert left <= policy.remaining(stage=0, vision=vision, images=images) <= left + images
    assert vision_bounds(policy, layers=4, vision=576, images=1) == (576, 316, 174, 174)


# --- counts, bounds, options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ToMe(keep=0.125), LightKV()], ids=["ToMe", "LightKV"])
def test_the_bound_holds_with_a_token_at_the_end_of_each_line(policy):
    """LLaVA-NeXT, 672 x 672: an overview of 24 x 24 patches, then 48 lines of 48 patches and a newline; and a text."""
    line, column = np.divmod(np.arange(48 * 49), 49)
    overview = np.stack([np.zeros(576, int), *np.divmod(np.arange(576), 24)], axis=-1)
    whole = np.where((column == 48)[:, None], [1, -1, -1], np.stack([np.ones_like(line), line, column], axis=-1))
    grid = np.concatenate([overview, whole, np.full((4, 3), -1)])
    length = len(grid)
    place, random = np.arange(length), np.random.default_rng(0)
    inputs = vlkv.Inputs._rounded(
        Buckets(), tokens=np.zeros((1, length), np.int32), valid=np.ones((1, length), bool), grid=grid[None],
        positions=place[None, :, None], vision_index=np.where(place < length - 4, place, -1)[None], pixels=None,
        max_vision=3072, max_images=2,
    )  # fmt: skip
    bounds = vision_bounds(
        policy, layers=40, vision=inputs.max_vision, images=inputs.max_images, placeless=inputs.max_placeless
    )
    x, keys = (jnp.array(random.normal(size=shape), jnp.float32) for shape in ((length, 4), (1, length, 4)))
    tokens = tokens_of(x, grid)
    for stage, after in enumerate(policy.reductions(40)):
        obs = observation(tokens, keys, keys)
        tokens, kept = _reduce(policy, tokens, obs, stage)
        tokens = dataclasses.replace(tokens, valid=kept)
        assert int((kept & tokens.is_vision).sum()) <= bounds[after] < 1.2 * inputs.max_vision / 2 ** (stage + 1)
        assert kept[grid[:, 1] < 0].all()


def test_defaults():
    assert ToMe(keep=0.125).reductions(40) == LightKV().reductions(40) == (15, 23, 31)
    assert int(ToMe(keep=0.125).left(576)[-1]) == 288
    assert PiToMe(keep=0.5).margins == pytest.approx((0.675, 0.45, 0.225))


closest = jax.jit(matching.closest)
merge_order = jax.jit(matching.merge_order)
fold = jax.jit(matching.fold)
sizes, largest = jax.jit(matching.sizes), jax.jit(matching.largest)
LENGTH, WIDTH = 53, 6


def cosines(x):
    u = np.float64(x) / np.maximum(np.linalg.norm(np.float64(x), axis=1, keepdims=True), 1e-12)
    return u @ u.T


@pytest.fixture
def random():
    return np.random.default_rng(5)


@pytest.fixture
def case(random):
    """Tokens in groups of which one is empty of receiving tokens and one has a single token."""
    group = random.choice([-1, 3, 7, 1000], LENGTH)
    group[17] = 5
    receiving = (random.random(LENGTH) < 0.4) & ~np.isin(group, [7, 5])
    return random.standard_normal((LENGTH, WIDTH)).astype(np.float32), receiving, group.astype(np.int32)


def test_groups_are_counted_and_ranked(case, random):
    _, mask, group = case
    value = random.integers(-3, 4, LENGTH)  # many ties
    functions = matching.sum_within, matching.largest_within, matching.rank_within
    run = jax.jit(
        lambda mask, value, group: [f(group, x) for f, x in zip(functions, (mask, value, value), strict=True)]
    )
    sums, best, rank = map(np.asarray, run(mask, value, group))
    for i in range(LENGTH):
        mine = np.flatnonzero(group == group[i])
        assert sums[i] == mask[mine].sum() and best[i] == value[mine].max()
    for g in set(group):
        mine = np.flatnonzero(group == g)
        order = mine[np.argsort(value[mine], kind="stable")]
        np.testing.assert_array_equal(rank[order], np.arange(len(mine)))
    np.testing.assert_array_equal(jax.jit(matching.numbered)(group), np.unique(group, return_inverse=True)[1])


@pytest.mark.parametrize("elements", [2**22, 4 * (LENGTH // 2)], ids=["one block", "blocks of 4"])
def test_closest_of_the_same_group(monkeypatch, case, elements):
    monkeypatch.setattr(matching, "_BLOCK_ELEMENTS", elements)
    x, receiving, group = case
    run = jax.jit(partial(matching.closest))  # traced anew: the size of a block is patched
    target, cosine = (np.asarray(y) for y in run(x, receiving, group))
    want = np.where(receiving & (group[:, None] == group), cosines(x), -np.inf)
    np.testing.assert_allclose(cosine, want.max(axis=1), atol=1e-6)
    found = np.isfinite(cosine)
    assert found.any() and not found[group == 7].any()
    np.testing.assert_array_equal(target[found], want.argmax(axis=1)[found])


def test_ties_go_to_the_earlier_token_on_both_sides():
    x = np.array([[1, 0], [2, 0], [3, 0], [0, 0], [4, 0], [5, 0], [1, 1], [0, 1]], np.float32)  # twice one direction
    even, group = np.arange(8) % 2 == 0, np.zeros(8, np.int32)
    target, cosine = map(np.asarray, closest(x, ~even, group))
    assert target[0] == target[2] == target[4] == 1
    merged = np.asarray(merge_order(cosine, even, group)) < 2
    np.testing.assert_array_equal(np.flatnonzero(merged), [0, 2])
    assert np.isfinite(cosine).all(), "a vector of zeros is like none, and no NaN"


# --- a class token at place 0, which is neither merged nor receives ---------------------------------------------------
