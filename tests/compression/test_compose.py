"""Compositions: who owns each stage, what is refused, and options that are replaced."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.mechanisms import IN_BITS
from vlkv import policies
from vlkv.compression.observe import LayerBudget, Observation
from vlkv.policies import Policy, Smooth, compose, make, slots_of

EQUAL, QUERIES = "gives equal budgets", "depend on no queries, so observing the answer would change nothing: leave"
REFUSED = [
    # Parts without effect.
    ("h2o(keep=0.3), allocate=snapkv", f"SnapKV .* {EQUAL}"),
    ("snapkv(keep=0.3), allocate=aircache(keep=0.3, scope='all', allocation='uniform')", "equal budgets"),
    ("snapkv(keep=0.3), allocate=adakv(keep=0.3, safeguard=1.0)", "equal budgets"),
    ("snapkv(keep=0.3), rank=elasticcache", "does not rank"),
    ("snapkv(keep=0.3), rank=roco(keep=0.3, spread=0.0)", "does not rank"),
    ("snapkv(keep=0.3), rank=criticalkv(keep=0.3, first_share=1.0)", "does not rank"),
    ("snapkv(keep=0.3, scope='vision'), rank=meda", "does not rank"),
    ("lookm(keep=0.3), merge=lookm", "already its own"),
    ("h2o(keep=0.3), step=h2o", "already its own"),
    ("full(), merge=lookm", "keeps every token"),
    ("full(), smooth=smooth(3)", "nothing to smooth"),
    ("snapkv(keep=0.3), smooth=smooth(1)", "changes nothing"),
    ("streamingllm(keep=0.3), smooth=smooth(3)", "does not change the order"),
    *(
        (f"{name}(keep=0.5, on='cache'), {part}", "merges in its own order")
        for name in ("tome", "pitome", "tofu")
        for part in ("rank=roco", "smooth=smooth(3)")
    ),
    # Parts that do not fit.
    ("snapkv(keep=0.2), allocate=prefixkv(keep=0.3)", "another budget"),
    ("snapkv(keep=0.2), reduce=h2o(keep=0.2)", "does not reduce"),
    ("fastv(keep=0.2), reduce=fastv(keep=0.2)", "both reduce"),
    ("fastv(keep=0.2), allocate=prefixkv", "evicts nothing"),
    ("compose(fastv(keep=0.2)), reduce=fastv(keep=0.2)", "both reduce"),
    ("fastv(keep=0.5), smooth=smooth(3)", "allocate, merge or smooth"),
    ("snapkv(keep=0.2), merge=h2o", "does not merge"),
    ("aircache(keep=0.2, cap=2.0), allocate=prefixkv", r"give it the cap=2\.0"),
    ("snapkv(keep=0.3, scope='vision'), step=avl(keep=0.3, prefill=0.5)", "give it as reduce="),
    ("lookm(keep=0.3, variant='released'), reduce=fastv(keep=0.3)", "do not support reduced prompts"),
    ("snapkv(keep=0.5, scope='vision'), merge=tome", "give it as reduce="),
    ("snapkv(keep=0.2), step=snapkv", "does nothing while decoding"),
    ("snapkv(keep=0.2), store=h2o(keep=0.5)", "does not quantise"),
    ("kvzip(keep=0.5), reduce=fastv(keep=0.5)", "compose: FastV reduces the prompt, so it cannot be repeated"),
    *(
        (f"{name}(keep=0.1), {part}", "divides the bits")
        for name in IN_BITS
        for part in ("store=kivi", "allocate=prefixkv", "smooth=smooth(3)")
    ),
    *((f"snapkv(keep=0.1), store={name}(keep=0.1)", "divides the bits") for name in IN_BITS),
    # An answer that cannot observe.
    ("fastv(keep=0.5), answer=4", "answer=4: FastV reduces the prompt before there is an answer: leave"),
    ("kvzip(keep=0.5), answer=4", "KVzip repeats the prompt before there is an answer: leave out"),
    ("h2o(keep=0.5), answer=4", "H2O updates the cache while decoding, from the first token on: leave"),
    *((f"{name}(keep=0.5), answer=4", QUERIES) for name in ("random", "knorm", "streamingllm")),
    ("kivi(), answer=4", QUERIES),
    ("compose(keydiff(keep=0.5), allocate=prefixkv), answer=4", QUERIES),
    ("snapkv(keep=0.5), answer=-1", "answer=-1"),
    ("snapkv(keep=0.5), answer=1.5", r"answer=1\.5"),
    ("snapkv(keep=0.5), answer=True", "answer=True"),
    ("snapkv(keep=0.5), answer=later", "options must be literals"),
    ("snapkv(keep=0.5), answers=4", "answer=, every= and first="),
    # Smoothing.
    ("snapkv(keep=0.5), smooth=smooth(4)", "must be odd, or give one_sided=True"),
    ("snapkv(keep=0.5), smooth=smooth(0)", "at least 1"),
    ("snapkv(keep=0.5), smooth=smooth(3.0)", "whole number"),
    ("snapkv(keep=0.5), smooth=smooth((3, 3, 3))", "or two of them"),
    ("snapkv(keep=0.5), smooth=smooth(3, one_sided=1)", "True or False"),
    ("snapkv(keep=0.5), smooth=smooth(3, pooling='sum')", '"avg" or "max"'),
]


@pytest.mark.usefixtures("shapes_for_arrays")  # which switches the types of arguments off
def test_what_is_refused_is_said_in_a_line():
    for text, said in REFUSED:
        with pytest.raises(vlkv.InputError, match=said) as error:
            make(f"compose({text})")
        assert "\n" not in str(error.value) and len(str(error.value)) <= 200
    with pytest.raises(vlkv.InputError, match="must be a Smooth"):
        compose(SNAP, smooth=3)


def test_parts_with_an_effect_stay():
    make("compose(pyramidkv(keep=0.3), allocate=snapkv)")  # equal budgets instead
    make("compose(tome(keep=0.5, on='cache'), allocate=adakv)")
    make("compose(tome(keep=0.5, on='cache'), merge=lookm, rank=roco)")


SNAP, PREFIX, KIVI = policies.SnapKV(keep=0.4), policies.PrefixKV(keep=0.4), policies.KIVI(bits=4)


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ("compose(snapkv, allocate=prefixkv), store=kivi", "snapkv, allocate=prefixkv, store=kivi"),
        ("compose(compose(snapkv, allocate=prefixkv), step=h2o), store=kivi",
         "snapkv, allocate=prefixkv, step=h2o, store=kivi"),
        ("snapkv, allocate=compose(h2o, allocate=prefixkv)", "snapkv, allocate=prefixkv"),
        ("compose(snapkv, allocate=pyramidkv), allocate=compose(prefixkv, store=kivi)", "snapkv, allocate=prefixkv"),
        ("snapkv, merge=compose(lookm, store=kivi)", "snapkv, merge=lookm"),
        ("compose(snapkv, reduce=compose(fastv, store=kivi)), store=kivi", "snapkv, reduce=fastv, store=kivi"),
        ("compose(compose(fastv)), store=kivi", "fastv, store=kivi"),
        ("compose(snapkv, smooth=smooth(9)), store=kivi", "snapkv, smooth=smooth(9), store=kivi"),
        ("compose(snapkv, smooth=smooth(9)), smooth=smooth(3)", "snapkv, smooth=smooth(3)"),
    ],
)  # fmt: skip
def test_each_stage_stays_with_its_owner_however_deep_it_was_given(nested, flat):
    one, other = (make(f"compose({text})", keep=0.4) for text in (nested, flat))
    assert one == other and not any(isinstance(part, policies.Composed) for part in slots_of(one).owners)


def test_a_composition_follows_what_is_replaced():
    part = policies.PrefixKV(keep=0.2, cap=2.0)
    whole = compose(policies.SnapKV(keep=0.2), allocate=part, store=policies.KIVI)
    half = dataclasses.replace(whole, keep=0.5)
    slots = slots_of(half)
    assert half.keep == slots.score.keep == slots.allocate.keep == 0.5 and slots.store == slots_of(whole).store
    few = dataclasses.replace(whole, keep=None, budget=9, scope="vision", cap=None)
    for made in (few, slots_of(few).score, slots_of(few).allocate):
        assert (made.keep, made.budget, made.scope, made.cap) == (None, 9, "vision", None)
    assert dataclasses.replace(whole) == whole
    reducing = compose(policies.FastV(keep=0.5, layer=1), store=policies.KIVI)
    assert slots_of(dataclasses.replace(reducing, keep=0.25)).reduce.keep == 0.25


class Own(Policy):
    """An option of a user that means a count or a share."""

    some: int | float = 1


@pytest.mark.parametrize(("cls", "option"), [(policies.H2O, "recent"), (Own, "some")])
def test_a_count_is_no_share(cls, option):
    count, share = (cls(keep=0.3, **{option: value}) for value in (1, 1.0))
    assert count != share and hash(count) != hash(share)
    assert compose(count, store=policies.KIVI) != compose(share, store=policies.KIVI)
    for policy in (count, share) if cls is not Own else ():
        assert make(policies.text_of(policy)) == policy
    whole, real = (cls(keep=value) for value in (1, 1.0))  # here both mean a share
    assert whole == real and hash(whole) == hash(real)


select = jax.jit(policies.select)


def observation(in_scope, grid=None):
    """All that smoothing looks at."""
    nothing = jnp.zeros((2, len(in_scope), 2))
    scope = in_scope
    return Observation(
        q=nothing, k=nothing, v=nothing, is_vision=scope, valid=scope, in_scope=scope, layer=0, grid=grid,
        budget=LayerBudget(asked=jnp.float32(1), mean=jnp.int32(1)),
    )  # fmt: skip


@partial(jax.jit, static_argnums=0)
def run(smooth, scores, in_scope, grid):
    return smooth(scores, observation(in_scope, grid))


def smoothed(smooth, scores, in_scope, grid=None):
    grid = None if grid is None else np.array(grid, np.int32)
    return np.asarray(run(smooth, np.array([scores], np.float32), np.array(in_scope), grid))[0]


def test_along_tokens_by_hand():
    scores, inside = [6, 0, 0, 12, 3, 9], [True] * 5 + [False]
    assert smoothed(Smooth(3), scores, inside).tolist() == [3, 2, 4, 5, 7.5, 9]
    assert smoothed(Smooth(2, one_sided=True), scores, inside).tolist() == [6, 3, 0, 6, 7.5, 9]
    assert smoothed(Smooth(3, pooling="max"), scores, inside).tolist() == [6, 6, 12, 12, 12, 9]
    assert smoothed(Smooth(1), scores, inside).tolist() == scores


def test_the_grid_may_have_holes_and_padding_with_places():
    """Against a loop over pairs: a place without a token has neighbours on both sides, and padding is nowhere."""
    rng = np.random.default_rng(0)
    grid = np.array([(image, y, x) for image in range(2) for y in range(5) for x in range(6)])
    scores, among = rng.normal(size=(2, len(grid))), rng.random(len(grid)) < 0.6
    grid[~among] = grid[rng.permutation(np.flatnonzero(among))[: (~among).sum()]]  # places of other tokens
    for smooth in (Smooth((3, 5)), Smooth((4, 2), one_sided=True), Smooth((3, 3), pooling="max")):
        low = [size - 1 if smooth.one_sided else size // 2 for size in smooth.kernel]
        high = [0 if smooth.one_sided else size // 2 for size in smooth.kernel]
        want = scores.copy()
        for t in np.flatnonzero(among):
            away = grid[:, 1:] - grid[t, 1:]
            near = among & (grid[:, 0] == grid[t, 0]) & (away >= np.negative(low)).all(1) & (away <= high).all(1)
            want[:, t] = (np.max if smooth.pooling == "max" else np.mean)(scores[:, near], axis=1)
        got = run(smooth, scores.astype(np.float32), among, grid)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_composition_ranks_by_smoothed_scores_and_pays_by_the_others():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 4, 40, 8)).astype(np.float32), rng.normal(size=(2, 2, 40, 8)).astype(np.float32)
    vision = (np.arange(40) >= 3) & (np.arange(40) < 33)
    plain, smooth = policies.AirCache(keep=0.2, window="text"), Smooth(4, one_sided=True)
    before = select(plain, q, k, k, vision)
    after = select(compose(plain, smooth=smooth), q, k, k, vision)
    np.testing.assert_array_equal(after.budgets, before.budgets)
    for layer in range(2):
        for head in range(2):
            scores = np.asarray(before.scores, np.float64)[layer, head, 3:33]
            means = [scores[max(0, t - 3) : t + 1].mean() for t in range(30)]
            count = int(before.budgets[layer, head])
            kept = np.flatnonzero(np.asarray(after.kept)[layer, head, 3:33])
            assert set(kept) == set(np.argsort(means)[::-1][:count])
    assert not np.array_equal(before.kept, after.kept)


def test_a_grid_must_be_given():
    q = np.zeros((1, 2, 8, 4), np.float32)
    with pytest.raises(vlkv.InputError, match="pass grid="):
        policies.select(compose(policies.SnapKV(keep=0.3), smooth=Smooth((3, 3))), q, q, q, np.ones(8, bool))


def test_measured_weights_of_each_head_against_a_loop_over_pairs():
    """On a grid with holes and in reading order; a pair counts with the weight of its offset, which has a direction."""
    rng = np.random.default_rng(3)
    grid = np.array([(image, y, x) for image in range(2) for y in range(4) for x in range(5)])
    scores, among = rng.normal(size=(2, len(grid))), rng.random(len(grid)) < 0.7
    each = [tuple(map(tuple, rng.uniform(0.1, 1, (3, 2)).round(2).tolist())) for _ in range(3)]
    each[2] = ((0.0, 0.5),) * 3  # one head does not use the last offset
    kernels = {"grid": [(0, 0), (1, -1), (-2, 1)], "order": [(0,), (3,), (-1,)]}
    for on, offsets in kernels.items():
        place = grid if on == "grid" else np.stack([np.zeros(len(grid), int), np.arange(len(grid))], axis=1)
        for pooling in ("avg", "max"):
            smooth = Smooth(tuple((*d, w) for d, w in zip(offsets, each, strict=True)), pooling=pooling)
            want = scores.copy()
            for head, t in ((h, t) for h in range(2) for t in np.flatnonzero(among)):
                terms = [
                    weight[0][head] * (scores[head, s] - min(0, scores[head, among].min()))
                    for s in np.flatnonzero(among)
                    for d, weight in zip(offsets, each, strict=True)
                    if (place[t] - place[s]).tolist() == [0, *d] and weight[0][head] > 0
                ]
                want[head, t] = (sum if pooling == "avg" else max)([*terms, 0.0])
            got = run(smooth, scores.astype(np.float32), among, grid)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_measured_weights_of_another_model_are_refused():
    kernel = ((0, ((1.0, 1.0),) * 3), (1, ((0.5, 0.2),) * 3))  # three layers of two heads
    q, k = np.zeros((2, 4, 8, 4), np.float32), np.zeros((2, 2, 8, 4), np.float32)
    policy = compose(policies.SnapKV(keep=0.3), smooth=Smooth(kernel))
    with pytest.raises(vlkv.InputError, match="weights for 3 layers, but the model has 2"):
        policies.select(policy, q, k, k, np.ones(8, bool))
    q, k = np.zeros((3, 4, 8, 4), np.float32), np.zeros((3, 1, 8, 4), np.float32)
    with pytest.raises(vlkv.InputError, match="weights for 2 key heads, but the model has 1"):
        policies.select(policy, q, k, k, np.ones(8, bool))


@pytest.mark.parametrize(
    "kernel",
    [(), ((0,),), ((0, 1.0), (0, 0.5)), ((0, 1.0), (0, 1, 0.5)), ((0, -1.0),), ((0, 0.0),), ((0.5, 1.0),), ((65, 1.0),),
     ((0, "1"),), ((0, float("nan")),), ((0, (1.0, 2.0)),), ((0, ((1.0,), (1.0, 2.0))),)],
)  # fmt: skip
def test_what_is_no_kernel_is_refused(kernel):
    with pytest.raises(vlkv.InputError, match="kernel="):
        Smooth(kernel)
