"""What every method promises, on arrays; and whole models, once for each mechanism.

The equations of the methods have tests of their own.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.families import tiny
from tests.models import embed
from tests.policies import arrays, test_reference
from tests.policies.numpy_policies import total_budget
from vlkv import policies
from vlkv.compression.compose import at_keep
from vlkv.compression.sizes import vision_bounds

OPTIONS = {
    name: {"window": 4}
    for name in ("snapkv", "pyramidkv", "adakv", "cake", "criticalkv", "damage", "mixkv", "bacon", "rdkv")
} | {"csp": {"fill": True, "window": 4}}
# A larger budget only adds to what these keep: one order per layer, and shares that do not depend on the budget.
RANKINGS = {
    "Random", "ImgRandom", "StreamingLLM", "H2O", "SnapKV-vision", "TOVA", "Knorm", "KeyDiff", "ExpectedAttention",
    "ElasticCache", "LookM", "AVL", "CSP-all",
}  # fmt: skip
# Options that change what is promised, or how: other merging, published codes, caps, and parts of several methods.
VARIANTS = [
    policies.ToMe(keep=0.5, on="cache"),
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
            if (policy.reducer is not None) == reducing:
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
        total = total_budget(layers, count, policy.keep, policy.budget) if count else 0
        if policy.reducer is not None:
            bounds = vision_bounds(policy, layers=layers, vision=int(vision[row].sum()), images=images[row])
            most = np.array(bounds) * vision[row].any() + int((mask & ~vision[row]).sum())
            assert (spent <= most[:, None]).all() and (spent >= (count > 0)).all()
        elif policy.facts.budgets == "bits":
            assert (spent >= min(count, 1)).all() and (spent <= 16 * (total // layers)).all()
        elif policy.follows_paper:
            assert spent.sum() == heads * total
            assert policy.facts.budgets == "heads" or (spent.sum(axis=0) == total).all()
            assert policy.cap is None or (spent <= np.ceil(policy.cap * total / layers)).all()


@pytest.mark.parametrize("policy", [*methods(False), *VARIANTS, *test_reference.CASES], ids=policies.text_of)
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
    if not policy.merges and not isinstance(policy, policies.ToMe):  # which merges with an option
        np.testing.assert_array_equal(chosen.k, batch.k)
        np.testing.assert_array_equal(chosen.v, batch.v)


@pytest.mark.parametrize("policy", [policy for policy in methods(False) if policy.keep], ids=policies.text_of)
def test_a_larger_budget_adds_to_a_ranking_and_keep_1_keeps_everything(policy):
    name, before = type(policy).__name__, False
    if policy.facts.own_keep or policy.facts.budgets == "bits":
        return
    batch = arrays.batch()
    for keep in (1e-6, policy.keep, 1.0):
        kept = arrays.compress(at_keep(policy, keep)).kept
        check_kept(at_keep(policy, keep), batch.vision, batch.valid, kept)
        assert (kept >= before).all() or not {name, f"{name}-{policy.scope}"} & RANKINGS
        before = kept
    assert (kept == batch.valid[:, None, None]).all()


# --- whole models -----------------------------------------------------------------------------------------------------

MECHANISMS = {
    "equal budgets": policies.SnapKV(keep=0.4, window=4),
    "per layer": policies.AirCache(keep=0.3),
    "per head": policies.compose(policies.SnapKV(keep=0.3, window=4), allocate=policies.AdaKV),
    "merging": policies.LookM(keep=0.4, merging="weighted"),
    "reduction": policies.compose(policies.PyramidKV(keep=0.5, window=2), reduce=policies.FastV(keep=0.3, layer=1)),
    "eviction": policies.H2O(keep=0.4),
    "quantised store": policies.KIVI(bits=4),
    "repetition": policies.KVzip(keep=0.4, sinks=2),
    "answer time": policies.compose(policies.SnapKV(keep=0.4, window=4), answer=1),
}  # `test_rdkv.py` has budgets of bits


@pytest.fixture(scope="module")
def inputs():
    """The prompts of `arrays` for the tiny model, and the same in reverse order with their padding moved."""
    batch = arrays.batch()
    rows, rng = len(arrays.PROMPTS), np.random.default_rng(0)
    tokens, pixels = rng.integers(6, 50, (rows, arrays.LENGTH)), rng.normal(size=(2, 3, 20, 20)).astype(np.float32)

    def of(rows, tokens):
        vision, valid, grid = batch.vision[rows], batch.valid[rows], batch.grid[rows]
        index = grid[..., 0] * arrays.SIDE**2 + grid[..., 1] * arrays.SIDE + grid[..., 2]
        return vlkv.Inputs(
            tokens=tokens, positions=batch.positions[rows][..., None], valid=valid, grid=grid, pixels=pixels,
            vision_index=np.where(vision, index, -1), max_vision=16, max_text=23, max_instruction=23, max_images=2,
        )  # fmt: skip

    index = arrays.shifts(batch.valid[:rows])
    return of(slice(rows), tokens), of(slice(-rows, None), np.take_along_axis(tokens[::-1], index, axis=1)), index


def check_answer(params, batch, kept, output, softmax_n, rows) -> None:
    """Each token is the most likely one in float64 after decoding from just the entries that are kept."""
    x = np.asarray(embed(params, batch))
    for row in rows:
        valid, tokens = batch.valid[row], output.tokens[row]
        logits, layers = reference.prefill(params.decoder, x[row, valid], batch.positions[row, valid][:, 0])
        later = reference.decode(
            params.decoder, layers, kept[row][..., valid], tokens[:-1], softmax_n, first=int(valid.sum())
        )
        logits = np.concatenate([logits[None], later])
        assert (logits[np.arange(len(logits)), tokens] >= logits.max(axis=1) - 1e-4).all()


@pytest.mark.parametrize("name", MECHANISMS)
def test_generate_of_every_mechanism(params, inputs, name):
    policy, (batch, moved, index) = MECHANISMS[name], inputs
    output, again = (jax.tree.map(np.asarray, tiny.answer(params, x, policy)) for x in (batch, moved))
    kept = output.kept.swapaxes(0, 1)
    if name != "answer time":
        images = batch.grid[..., 0].max(axis=1) + 1
        check_kept(policy, batch.is_vision, batch.valid, kept, images)
        assert output.slots == vlkv.pool_slots(params, batch, policy, new_tokens=tiny.NEW)
    np.testing.assert_array_equal(again.tokens[::-1], output.tokens)
    np.testing.assert_array_equal(again.kept, np.take_along_axis(output.kept[:, ::-1], index[None, :, None], axis=-1))
    if policy.reducer is None and not policy.facts.repeats and name != "answer time":
        prompt, rows = programs.read_prompt(params, batch), len(arrays.batch().q) // len(batch.valid)
        q, k, v = (np.stack([getattr(x, name) for x in prompt.layers], 1).swapaxes(2, 3) for name in "qkv")
        q, k, v = (np.where(batch.valid[:, None, None, :, None], x, 9.0) for x in (q, k, v))  # whatever padding holds
        found = arrays.compress_batch(policy, arrays.batch()._replace(
            **{name: np.concatenate([x] * rows) for name, x in zip("qkv", (q, k, v), strict=True)},
            vision=np.concatenate([batch.is_vision] * rows),
            valid=np.concatenate([batch.valid] * rows),
        ))  # fmt: skip
        np.testing.assert_array_equal(found.kept[: len(kept)], kept)
    if name in ("equal budgets", "per layer", "per head", "repetition"):
        check_answer(params, batch, kept, output, policy.softmax_n, range(len(kept)))


def test_a_model_of_nan_answers_nothing(params, inputs):
    broken = tiny.answer(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params), inputs[0], MECHANISMS["per layer"])
    assert (broken.tokens == -1).all() and (broken.lengths == 1).all()
