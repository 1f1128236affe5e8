"""ToMe, PiToMe and ToFu as policies: published vectors, numpy from the equations, and what they leave."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.policies.arrays import observation, tokens_of
from tests.policies.golden_vectors import same_rows
from vlkv.buckets import Buckets
from vlkv.compression.selection import compress
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


def test_golden_tome(golden):
    g = golden("token_merging")
    for i in range(len(g["tome_merge_counts"])):
        want = g[f"as_released_tome_tokens_class0_count{i}"], g[f"as_released_tome_sizes_class0_count{i}"]
        policy = ToMe(keep=len(want[0]) / len(g["tokens"]), layers=(1,))
        x, size, kept = reduce(policy, g["tokens"], g["metric"][None], size=g["token_sizes"][:, 0])
        same_rows(np.column_stack([x, size])[kept], np.column_stack(want))


@pytest.mark.parametrize("class_token", [0, 1])
def test_golden_pitome(golden, pairs, class_token):
    g = golden("token_merging")
    members = len(g["tokens"]) - class_token
    lone = range(class_token)
    for r, m in pairs(g["keep_ratios"], g["pitome_margins"]):
        name = f"class{class_token}_ratio{r}_margin{m}"
        want = g[f"as_released_pitome_tokens_{name}"], g[f"as_released_pitome_sizes_{name}"]
        keep = (len(want[0]) - class_token) / members
        policy = PiToMe(keep=keep, layers=(1,), margin=float(g["pitome_margins"][m]))
        x, size, kept = reduce(policy, g["tokens"], g["metric"][None], size=g["token_sizes"][:, 0], lone=lone)
        same_rows(np.column_stack([x, size])[kept], np.column_stack(want))


@pytest.mark.parametrize("mode", ["tofu", "prune"])
def test_golden_tofu(golden, mode):
    g = golden("token_merging")
    for i in range(len(g["keep_ratios"])):
        want = g[f"as_released_tofu_{mode}_class0_ratio{i}"]
        keep = len(want) / len(g["tokens"])
        policy = ToFu(keep=keep, layers=(1,), mode=mode, pruning=0, variant="released")
        x, _, kept = reduce(policy, g["tokens"], g["metric"][None])
        same_rows(x[kept], want)


# --- from the equations ----------------------------------------------------------------------------------------------


def bipartite(keys, members, removed):
    """Where the closest even members go (-1: nowhere), by keys averaged over heads."""
    metric = np.float64(keys).mean(axis=0)
    metric /= np.maximum(np.linalg.norm(metric, axis=1, keepdims=True), 1e-12)
    a, b = np.flatnonzero(members)[::2], np.flatnonzero(members)[1::2]
    target = np.full(len(members), -1)
    if removed:
        cosine = metric[a] @ metric[b].T
        first = np.argsort(-cosine.max(axis=1), kind="stable")[:removed]
        target[a[first]] = b[cosine.argmax(axis=1)[first]]
    return target


@pytest.fixture(params=["left padded", "right padded"])
def row(request):
    """30 tokens, 19 of them vision, one of those on no grid, and 6 of padding."""
    random = np.random.default_rng(11)
    x = random.standard_normal((30, 12)).astype(np.float32)
    keys = random.standard_normal((2, 30, 8)).astype(np.float32)
    vision = (np.arange(30) >= 4) & (np.arange(30) < 23)
    size = random.integers(1, 5, 30).astype(np.float32)
    pad = (6, 0) if request.param == "left padded" else (0, 6)
    valid = np.pad(np.ones(30, bool), pad)
    arrays = np.pad(x, [pad, (0, 0)]), np.pad(keys, [(0, 0), pad, (0, 0)]), np.pad(vision, pad), valid
    return *arrays, np.pad(size, pad, constant_values=1), pad[0] + 4


@pytest.mark.parametrize("mode", ["tome", "paper", "released", "mean", "amax", "prune", "early"])
def test_merging_agrees_with_the_equations(row, mode):
    x, keys, vision, valid, size, lone = row
    members = vision.copy()
    members[lone] = False
    if mode == "tome":
        policy = ToMe(keep=0.36, layers=(1, 2))
    elif mode in ("paper", "released"):
        policy = ToFu(keep=0.36, layers=(1, 2), variant=mode)
    else:
        policy = ToFu(keep=0.36, layers=(1, 2), mode="tofu" if mode == "early" else mode)
    stage = 0 if mode == "early" else 1
    got, sizes, kept = reduce(policy, x, keys, vision, valid=valid, size=size, lone=[lone], stage=stage)
    target = bipartite(keys, members, 18 - 11)  # the root of 0.36 is 0.6: 10.8 of 18
    np.testing.assert_array_equal(kept, valid & (target < 0))
    for j in np.flatnonzero(kept):
        together = [j, *np.flatnonzero(target == j)]
        if mode in ("prune", "early") or len(together) == 1:
            np.testing.assert_array_equal(got[j], x[j])
            assert sizes[j] == size[j]
            continue
        some = np.float64(x[together])
        norms = np.linalg.norm(some, axis=1)
        mean = some.mean(axis=0)
        want = {
            "tome": np.average(some, axis=0, weights=size[together]),
            "mean": mean,
            "amax": some.max(axis=0),
            "paper": mean / np.linalg.norm(mean) * norms.max(),
            "released": mean / norms[0] * norms.max(),
        }[mode]
        np.testing.assert_allclose(got[j], want, rtol=1e-5, atol=1e-5)
        assert sizes[j] == size[together].sum()


def test_pitome_protects_what_stands_out(row):
    x, keys, vision, valid, size, lone = row
    members = vision.copy()
    members[lone] = False
    policy = PiToMe(keep=0.7, layers=(3,), margin=0.1)
    got, sizes, kept = reduce(policy, x, keys, vision, valid=valid, size=size, lone=[lone])
    metric = np.float64(keys).mean(axis=0)[members]
    metric /= np.linalg.norm(metric, axis=1, keepdims=True)
    likeness = metric @ metric.T
    energy = np.where(likeness > 0.1, likeness - 0.1, np.expm1(likeness - 0.1)).mean(axis=1)
    order = np.flatnonzero(members)[np.argsort(-energy, kind="stable")][: 2 * 5]  # 12.6 of 18 are left: 13
    a, b = order[::2], order[1::2]
    np.testing.assert_array_equal(np.flatnonzero(valid & ~kept), np.sort(a))
    place = np.cumsum(members) - 1
    goes = b[likeness[np.ix_(place[a], place[b])].argmax(axis=1)]
    for j in b:
        together = [j, *a[goes == j]]
        want = np.average(np.float64(x[together]), axis=0, weights=size[together])
        np.testing.assert_allclose(got[j], want, rtol=1e-5, atol=1e-5)
        assert sizes[j] == size[together].sum()


# --- on the cache ----------------------------------------------------------------------------------------------------


def by_energy(keys, members, removed, margin):
    """Where every second of the most energetic members goes."""
    metric = np.float64(keys).mean(axis=0)
    metric /= np.maximum(np.linalg.norm(metric, axis=1, keepdims=True), 1e-12)
    likeness = metric @ metric.T
    energy = np.where(likeness > margin, likeness - margin, np.expm1(likeness - margin))[:, members].mean(axis=1)
    order = np.flatnonzero(members)[np.argsort(-energy[members], kind="stable")][: 2 * removed]
    target = np.full(len(members), -1)
    target[order[::2]] = order[1::2][likeness[np.ix_(order[::2], order[1::2])].argmax(axis=1)] if removed else -1
    return target


@pytest.mark.full
@pytest.mark.parametrize("method", [ToMe, PiToMe, ToFu])
def test_on_the_cache_rounds_go_on_until_the_budget_is_met(method):
    random = np.random.default_rng(7)
    layers, length = 3, 40
    q, k, v = (random.standard_normal((layers, heads, length, 8)).astype(np.float32) for heads in (4, 2, 2))
    vision, valid = (np.arange(length) >= 5) & (np.arange(length) < 30), np.arange(length) < 37
    policy = method(keep=0.3, on="cache")
    got_k, got_v, got = jax.jit(compress)(policy, q, k, v, vision, valid)
    got_k, got_v, kept_by, budgets = (np.asarray(x) for x in (got_k, got_v, got.kept, got.budgets[:, 0]))
    assert budgets.sum() == math.floor(0.3 * layers * 25 + 0.5)
    for layer in range(layers):
        kept = kept_by[layer, 0]
        np.testing.assert_array_equal(kept, kept_by[layer, 1])
        keys, values, members, size = np.float64(k[layer]), np.float64(v[layer]), vision.copy(), np.ones(length)
        for number, margin in enumerate((0.675, 0.45, 0.225)):
            removed = min(members.sum() // 2, members.sum() - budgets[layer])
            target = (
                by_energy(keys, members, removed, margin) if method is PiToMe else bipartite(keys, members, removed)
            )
            before = keys.copy(), values.copy(), size.copy()
            for j in set(target[target >= 0]):
                together = [j, *np.flatnonzero(target == j)]
                if method is ToFu and number == 0:
                    continue
                for new, old in zip((keys, values), before, strict=False):
                    some = old[:, together]
                    new[:, j] = np.average(some, axis=1, weights=None if method is ToFu else before[2][together])
                    if method is ToFu:
                        norms = np.linalg.norm(some, axis=-1).max(axis=1, keepdims=True)
                        new[:, j] *= norms / np.linalg.norm(new[:, j], axis=-1, keepdims=True)
                size[j] = before[2][together].sum()
            members &= target < 0
        np.testing.assert_array_equal(kept, members | (valid & ~vision))
        np.testing.assert_allclose(got_k[layer][:, kept], keys[:, kept], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got_v[layer][:, kept], values[:, kept], rtol=1e-5, atol=1e-5)


# --- counts, bounds, options -----------------------------------------------------------------------------------------


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
