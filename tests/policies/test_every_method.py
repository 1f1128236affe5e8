"""Every method on arrays: what all methods promise, and float64 numpy written from the equations.

`test_mechanisms.py` runs whole models.
"""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.families import tiny
from tests.policies import arrays
from tests.policies import numpy_policies as reference
from tests.policies.test_vision_selection import ROWS, prompt, reduce
from vlkv import policies
from vlkv.compression.compose import at_keep
from vlkv.compression.sizes import vision_bounds

# One short window for all methods that have a window of so many tokens.
OPTIONS = {name: {"window": 4} for name, cls in policies.registry.items() if type(getattr(cls, "window", None)) is int}
OPTIONS |= {"csp": {"fill": True, "window": 4}}
# A larger budget only adds to what these keep: one order per layer, and shares that do not depend on the budget.
RANKINGS = {
    "Random", "ImgRandom", "StreamingLLM", "H2O", "SnapKV-vision", "TOVA", "Knorm", "KeyDiff", "ExpectedAttention",
    "ElasticCache", "LookM", "AVL", "CSP-all",
}  # fmt: skip
# Options that change what is promised, or how: other merging, published codes, caps, and parts of several methods.
VARIANTS = [
    policies.AVL(keep=0.5, core=0.3, refresh=2),
    *(method(keep=0.3, cap=1.0) for method in (policies.AirCache, policies.PrefixKV, policies.VLCache)),
    policies.compose(policies.SnapKV(keep=0.3, window=4), allocate=policies.PrefixKV, store=policies.KIVI(bits=4)),
    policies.compose(policies.CriticalKV(keep=0.4, window=4), allocate=policies.AdaKV),
    policies.compose(policies.H2O(keep=0.4), rank=policies.CriticalKV),
    policies.compose(policies.SnapKV(keep=0.5, window=4), smooth=policies.Smooth(3)),
    policies.CSP(keep=0.4, window=4, variant="released"),
    policies.LookM(keep=0.2, variant="released", merging="average"),
    policies.LookM(keep=0.2, variant="released", scope="vision", merging="weighted"),
    policies.PyramidKV(keep=0.4, window=4, variant="released"),
    *(policies.PrefixKV(keep=keep, variant="released") for keep in (1e-6, 0.3, 0.9)),
    *(policies.VLCache(keep=0.3, variant=variant) for variant in ("shared_window", "per_layer_window")),
]


def methods(reducing: bool):
    """Every method that reduces the prompt, or that does not, with its own scope and with the other one."""
    for name, cls in policies.registry.items():
        for scope in (cls.scope, "all" if cls.scope == "vision" else "vision"):
            try:
                policy = tiny.make_policy(name, scope=scope, **OPTIONS.get(name, {}))
            except vlkv.InputError:
                assert scope != cls.scope
                continue
            slots = policies.slots_of(policy)
            if slots.every and scope == "vision":  # refused, because text would never be evicted
                continue
            if (slots.reduce is not None) == reducing:
                yield policy


def check_text(policy) -> None:
    """The text of a policy makes the policy, with the scope that tables show, and with options that are None."""
    text = policies.text_of(policy, scope=True)
    assert policies.make(text) == policy and (f"scope='{policy.scope}'" in text) != isinstance(policy, policies.Full)
    for field in dataclasses.fields(policy):
        if field.name != "keep" and field.default is not None and "None" in str(field.type):
            other = dataclasses.replace(policy, **{field.name: None})
            assert policies.make(policies.text_of(other)) == other, field.name


def check_kept(policy, vision, valid, kept, images=None) -> None:
    """Budgets are exact, padding does not compete, and text out of scope stays. `kept` is [B, L, K, T]."""
    layers, heads = kept.shape[1:3]
    assert not (kept & ~valid[:, None, None]).any()
    inside = vision & valid if policy.scope == "vision" else valid
    assert (kept | ~(valid & ~inside)[:, None, None]).all()
    for row, mask in enumerate(inside):
        spent, count = kept[row][..., mask].sum(axis=-1), int(mask.sum())  # [L, K]
        total = reference.total_budget(layers, count, policy.keep, policy.budget) if count else 0
        if policies.slots_of(policy).reduce is not None:
            bounds = vision_bounds(policy, layers=layers, vision=int(vision[row].sum()), images=images[row])
            most = np.array(bounds) * vision[row].any() + int((mask & ~vision[row]).sum())
            assert (spent <= most[:, None]).all() and (spent >= (count > 0)).all()
        elif policy.facts.budgets == "bits":
            assert (spent >= min(count, 1)).all() and (spent <= 16 * (total // layers)).all()
        elif isinstance(policy, policies.CSP) and not policy.fill:
            assert (spent.sum(axis=0) <= total).all()
        elif policies.slots_of(policy).follows_paper:
            assert spent.sum() == heads * total
            assert policy.facts.budgets == "heads" or (spent.sum(axis=0) == total).all()
            assert policy.cap is None or (spent <= np.ceil(policy.cap * total / layers)).all()


def promises():
    """By default every method in its own scope; the other scope, and merging in several rounds, in CI."""
    yield from (policy for policy in methods(False) if policy.scope == type(policy).scope)
    others = [policy for policy in methods(False) if policy.scope != type(policy).scope]
    for policy in (*others, policies.ToMe(keep=0.5, on="cache")):
        yield pytest.param(policy, marks=pytest.mark.full)
    yield from (*VARIANTS, *reference.CASES)


@pytest.mark.parametrize("policy", promises(), ids=policies.text_of)
def test_every_method(policy):
    check_text(policy)
    batch, chosen = arrays.batch(), arrays.compress(policy)
    check_kept(policy, batch.vision, batch.valid, chosen.kept)
    inside = (batch.vision if policy.scope == "vision" else batch.valid)[:, None, None]
    valid, scores = batch.valid[:, None, None], chosen.scores
    assert (scores == -np.inf)[np.broadcast_to(~valid, scores.shape)].all()
    assert (scores == np.inf)[np.broadcast_to(valid & ~inside, scores.shape)].all()
    assert policy.cap is not None or np.isfinite(scores[np.broadcast_to(inside, scores.shape)]).all()
    # Neither padding nor other rows matter.
    rows = len(batch.valid) // 2
    index = arrays.shifts(batch.valid[:rows])[:, None, None]
    for x in (chosen.kept, scores):
        again = np.take_along_axis(x[:rows][::-1], index, axis=-1)
        np.testing.assert_allclose(again.astype(float), x[rows:].astype(float), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(chosen.budgets[:rows][::-1], chosen.budgets[rows:])
    if policies.slots_of(policy).merge is None:
        np.testing.assert_array_equal(chosen.k, batch.k)
        np.testing.assert_array_equal(chosen.v, batch.v)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=() if policy.scope == type(policy).scope else pytest.mark.full)
        for policy in methods(False)
        if policy.keep
    ],
    ids=policies.text_of,
)
def test_a_larger_budget_adds_to_a_ranking_and_keep_1_keeps_everything(policy):
    name, before = type(policy).__name__, False
    if hasattr(policy, "own_keep") or policy.facts.budgets == "bits":
        return
    batch = arrays.batch()
    for keep in (1e-6, policy.keep, 1.0):
        kept = arrays.compress(at_keep(policy, keep)).kept
        check_kept(at_keep(policy, keep), batch.vision, batch.valid, kept)
        assert (kept >= before).all() or not {name, f"{name}-{policy.scope}"} & RANKINGS
        before = kept
    assert (kept == batch.valid[:, None, None]).all()


@pytest.mark.parametrize("policy", methods(True), ids=policies.text_of)
def test_every_method_that_reduces_the_prompt(policy):
    """Text stays, padding goes, no more is left than promised, and it does not matter on which side padding is."""
    check_text(policy)
    after, bounds = policy.reductions(4), vision_bounds(policy, layers=4, vision=36, images=1)
    for row in range(len(ROWS)):
        runs = []
        for shift in (0, 1):  # the last token of each row is padding
            tokens, obs, valid, vision, *_ = prompt(row, shift)
            for stage, layer in enumerate(after):
                tokens, kept = reduce(policy, tokens, obs if layer else None, stage)
                kept = np.asarray(kept)
                np.testing.assert_array_equal(kept[~vision], valid[~vision])
                assert 1 <= (kept & vision).sum() <= bounds[layer]
                tokens = dataclasses.replace(tokens, valid=jnp.asarray(kept))
                if obs is not None:
                    obs = dataclasses.replace(obs, valid=tokens.valid, is_vision=obs.is_vision & tokens.valid)
            runs.append([np.roll(np.asarray(x), -shift, axis=0) for x in (kept, tokens.x, tokens.size)])
        (kept, *first), (again, *second) = runs
        np.testing.assert_array_equal(kept, again)
        for x, y in zip(first, second, strict=True):
            np.testing.assert_allclose(x[kept], y[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [policies.AirCache, policies.PrefixKV, policies.VLCache])
def test_a_cap_that_nothing_reaches_changes_nothing(method):
    exact, capped = (arrays.compress(method(keep=0.4, cap=cap)) for cap in (None, 3.0))
    np.testing.assert_array_equal(exact.kept, capped.kept)


def equations(policy):
    return getattr(reference, type(policy).__name__.lower())


def options(policy):
    """Those of `Prompt`, and those of the method's reference that are given."""
    names = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    common = {name: names.pop(name) for name in ("scope", "keep", "budget")}
    known = inspect.signature(equations(policy)).parameters
    return common, {name: value for name, value in names.items() if name in known and value is not None}


def entries(policy, k, v, kept, scores, inside):
    """Keys and values of one layer as they are stored."""
    if isinstance(policy, policies.AirCache):
        return [reference.merged_share(x, kept, scores, inside, policy.merging) for x in (k, v)]
    way = {policies.ElasticCache: "position", policies.MEDA: "average"}.get(type(policy))
    return reference.merged(k, v, kept, way or policy.merging)


@pytest.mark.parametrize("policy", reference.CASES, ids=policies.text_of)
def test_policy_agrees_with_the_equations(policy):
    got, batch = arrays.compress(policy), arrays.batch()
    common, own = options(policy)
    for row, name in enumerate(arrays.PROMPTS):
        q, k, v, vision, valid, _, _, _, norms, later, lse = (x[row] for x in batch)
        q, k, v, norms = (x[..., valid, :] for x in (q, k, v, norms[..., None]))
        prompt = reference.Prompt(q, k, vision[valid], **common, norms=norms[..., 0], later=later, lse=lse)
        kept, budgets, scores = equations(policy)(prompt, **own)
        budgets = budgets if budgets.ndim == 2 else budgets[:, None]
        np.testing.assert_array_equal(got.budgets[row], np.broadcast_to(budgets, got.budgets[row].shape), name)
        inside = np.flatnonzero(valid)[prompt.scope]
        expected = scores[..., prompt.scope]
        rounding = 3e-7 * max(
            1, np.abs(expected, where=np.isfinite(expected), out=np.ones_like(expected)).max(initial=0)
        )
        np.testing.assert_allclose(got.scores[row][..., inside], expected, 1e-4, rounding, err_msg=name)
        np.testing.assert_array_equal(got.kept[row][..., valid], kept, name)
        for layer in range(0 if policies.slots_of(policy).merge is None else prompt.layers):
            expected = entries(policy, k[layer], v[layer], kept[layer], scores[layer], prompt.scope)
            for ours, theirs in zip((got.k, got.v), expected, strict=True):
                stored = ours[row, layer][:, valid][kept[layer]]
                np.testing.assert_allclose(stored, theirs[kept[layer]], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("allocation", ["both", "skewness"])
def test_aircache_without_contrast_has_skewness_0_and_uniform_budgets(allocation):
    batch = arrays.batch()
    got = arrays.compress_batch(policies.AirCache(keep=0.5, allocation=allocation), batch._replace(k=0 * batch.k))
    assert (got.extra["skewness"] == 0).all()
    assert not any(np.isnan(x).any() for x in got.extra.values())
    assert (np.ptp(got.budgets[..., 0], axis=1) <= 1).all()
