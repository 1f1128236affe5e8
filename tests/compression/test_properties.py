"""Properties of stages and of compositions on arrays: each finds a kind of fault that has occurred, in every method.

No model is run. `one_layer` makes the cache of a single layer from given queries, keys and values.
"""

import contextlib
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.cache.test_decode_state import one_layer
from tests.models import CONFIG, unequal_batch
from vlkv import policies
from vlkv.cache.decode_state import DecodeState
from vlkv.cache.resizing import resize
from vlkv.cache.rings import Ring, Rings
from vlkv.compression import budgets
from vlkv.compression.observe import Layer, LayerContext, LayerRun
from vlkv.config import RopeConfig
from vlkv.generation import score as scoring
from vlkv.generation.prefill import fill_cache
from vlkv.generation.prompt import Prompt
from vlkv.inputs import Bounds
from vlkv.policies import Policy, Smooth, compose
from vlkv.policies.lookm import released_pairs

L, N, K, T, H = 3, 4, 2, 40, 8
select = jax.jit(policies.select)


def drawn(seed: int = 0, layers: int = L):
    """Queries, keys, values and a mask of vision tokens in the middle."""
    rng = np.random.default_rng(seed)
    q, k, v = (2 * rng.normal(size=(layers, n, T, H)).astype(np.float32) for n in (N, K, K))
    return q, k, v, (np.arange(T) >= 4) & (np.arange(T) < 30)


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [7, 100, 4300])
def test_shares_are_those_of_the_decimal_fraction(count):
    for percent in range(1, 100):
        exact = percent * count // 100
        assert budgets.shares(percent / 100, count)[-1] == exact, percent
    assert int(budgets.unbounded_share(0.29, jnp.int32(count))) == 29 * count // 100


def test_targets_that_do_not_fit_and_gradients_are_named():
    inputs, vocab = unequal_batch(), CONFIG.decoder.vocab_size
    for targets, said in (
        (np.zeros((3, 2)), "whole numbers"),
        (np.zeros((1, 2), int), r"give \[3, S\]"),
        (np.zeros(3, int), r"give \[3, S\]"),
        (np.full((3, 2), vocab), f"target {vocab} is not in the vocabulary"),
    ):
        with pytest.raises(vlkv.InputError, match=said):
            scoring._checked(targets, inputs, vocab)
    assert scoring._checked(np.full((3, 2), -1), inputs, vocab).shape == (3, 2)
    for gradient in (jax.grad(scoring._without_gradient), jax.jit(jax.grad(jax.jit(scoring._without_gradient)))):
        with pytest.raises(vlkv.InputError, match=r"differentiate vlkv.forward"):
            gradient(1.0)


# --- smoothing and ranking ------------------------------------------------------------------------------------------


class Given(Policy):
    """Scores that are the first channel of the values; the first four tokens are kept."""

    facts = policies.Facts(paper="none")

    def score(self, obs):
        return obs.v[..., 0]

    def protect(self, obs):
        return jnp.arange(obs.valid.shape[0]) < 4


GIVEN = Given(keep=0.4)


def ranked_by_others() -> dict[str, Policy]:
    """`GIVEN` with the ranking of each method that can rank scores of another one."""
    ranked = {}
    for cls in policies.registry.values():
        with contextlib.suppress(vlkv.InputError):
            ranked[f"rank={cls.__name__}"] = compose(GIVEN, rank=cls(keep=0.4), smooth=Smooth(3))
    return ranked


RANKED = {
    "smoothed": compose(GIVEN, smooth=Smooth(5)),
    "smoothed on the grid": compose(GIVEN, smooth=Smooth((3, 3))),
    **ranked_by_others(),
}


@pytest.mark.parametrize("name", RANKED)
def test_tokens_that_do_not_compete_do_not_matter(name):
    """Neither scores of tokens that are kept in any case, nor scores, values and places of padding."""
    q, k, v, vision = drawn(layers=1)
    v[..., 0] = -np.abs(v[..., 0])  # scores may be negative
    valid, rng = np.arange(T) < T - 6, np.random.default_rng(3)
    grid = np.stack([np.zeros(T, int), np.arange(T) // 6, np.arange(T) % 6], axis=1)
    norm = jnp.asarray(rng.random((1, K, T)), jnp.float32)
    context = LayerContext(positions=jnp.zeros((1, T, 1), jnp.int32), rope=RopeConfig(), output_norm=norm)
    kept = []
    for sentinel in (0.0, 1000.0, -1000.0):
        v[..., ~valid | (np.arange(T) < 4), 0] = sentinel
        grid[~valid] = grid[rng.permutation(T)[:6]]
        kept.append(select(RANKED[name], q, k, v, vision, valid, grid=grid, context=context).kept)
    np.testing.assert_array_equal(kept[0], kept[1])
    np.testing.assert_array_equal(kept[0], kept[2])


def test_text_that_is_preferred_does_not_lift_its_neighbours():
    """The priors of LookM, MEDA and TGVKV are between text and vision: each is smoothed among its own."""
    q, k, v, vision = drawn(layers=1)
    policy = policies.LookM(keep=0.2)
    plain, got = (np.asarray(select(p, q, k, v, vision).scores)[0] for p in (policy, compose(policy, smooth=Smooth(3))))
    for t in (4, 5, 29):  # at both edges of the image
        near = [s for s in (t - 1, t, t + 1) if vision[s]]
        np.testing.assert_allclose(got[:, t], plain[:, near].mean(axis=1), rtol=1e-5)
    assert not any(cls.one_scale for cls in (policies.LookM, policies.MEDA, policies.TGVKV))


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (policies.RoCo(keep=0.3, spread=1.0, recent=0, scope="vision"), ("deviation",)),
        (policies.CSP(keep=0.3, window=4, scope="vision"), ("self", "cross")),
    ],
    ids=("RoCo", "CSP"),
)
def test_all_that_is_ranked_by_is_smoothed(policy, names):
    q, k, v, vision = drawn(layers=1)
    vision[:] = True
    plain, got = (select(p, q, k, v, vision).extra for p in (policy, compose(policy, smooth=Smooth(9))))
    for name in names:
        rows = np.asarray(plain[name], np.float64)[0]
        want = np.stack([rows[:, max(0, t - 4) : t + 5].mean(axis=1) for t in range(T)], axis=1)
        np.testing.assert_allclose(got[name][0], want, rtol=1e-4, atol=1e-6)


def test_a_better_score_with_a_larger_norm_is_never_dropped_for_a_worse_one():
    """Also if scores are negative, as those of Knorm and KeyDiff."""
    rng = np.random.default_rng(0)
    scores, norm = rng.normal(size=(K, T)).astype(np.float32) - 3, rng.random((K, T)).astype(np.float32)
    for share in (0.0, 0.5):
        critical = policies.CriticalKV(keep=0.5, first_share=share)
        value, _ = jax.jit(critical.rank)(scores, {"norm": norm, "epsilon": jnp.float32(1e-4)}, np.arange(T) > 3,
                                          np.full(K, 12))  # fmt: skip
        for head in range(K):
            a, b = np.asarray(value)[head, 4:], slice(4, None)
            worse = (scores[head, b] <= scores[head, b][:, None]) & (norm[head, b] <= norm[head, b][:, None])
            assert (a[:, None] >= np.where(worse, a, -np.inf)).all()


# --- merging --------------------------------------------------------------------------------------------------------

MERGING = [
    policies.LookM(keep=0.5, merging="average"),
    policies.MEDA(keep=0.5),
    policies.ElasticCache(keep=0.5),
    policies.PrefixKV(keep=0.5, merging="position"),
    policies.PrefixKV(keep=0.5, merging="cosine"),
    policies.AirCache(keep=0.5, merging=1.0),
    policies.ToMe(keep=0.5, on="cache"),
    pytest.param(policies.PiToMe(keep=0.5, on="cache"), marks=pytest.mark.full),
]


@pytest.mark.parametrize("policy", MERGING, ids=str)
def test_every_dropped_token_is_in_exactly_one_kept_entry(policy):
    """Whatever each head keeps. The value of token t is the unit vector t, so entries show what they contain."""
    rng = np.random.default_rng(0)
    k, eye = rng.normal(size=(K, T, T)).astype(np.float32), np.broadcast_to(np.eye(T, dtype=np.float32), (K, T, T))
    merge, own = jax.jit(policy.merge), None
    if isinstance(policy, policies.ToMe):  # only budgets are free
        *_, own = jax.jit(policy.rounds)(k, k, np.ones(T, bool), np.ones(K, int))
    for counts in ((20, 20), (39, 5), (1, 12), (3, 1)):
        order = rng.random((K, T)) if own is None else np.broadcast_to(own, (K, T))
        kept = np.argsort(np.argsort(-order)) < np.array(counts)[:, None]
        merged = np.asarray(merge(k, eye, kept, order.astype(np.float32))[1])
        for head in range(K):
            inside = merged[head, kept[head]] != 0
            assert (inside.sum(axis=0) == 1).all(), (counts, head)


@pytest.mark.parametrize("misaligned", [False, True])
def test_released_pairs_with_unequal_heads(misaligned):
    """LOOK-M's published code compares the i-th dropped tokens of all heads, of those that have an i-th one."""
    rng = np.random.default_rng(1)
    target, cosine = rng.integers(0, T, (K, T)), rng.random((K, T)).astype(np.float32)
    gone = rng.random((K, T)) < np.array([[0.3], [0.7]])
    got_target, got = map(np.asarray, jax.jit(partial(released_pairs, misaligned=misaligned))(target, cosine, gone))
    dropped = [np.flatnonzero(x) for x in gone]
    near = [
        np.mean([cosine[h, d[i]] for h, d in enumerate(dropped) if i < len(d)]) for i in range(max(map(len, dropped)))
    ]
    for head, tokens in enumerate(dropped):
        similar = [i for i in range(len(tokens)) if near[i] >= np.mean(near)]
        pairs = {tokens[n if misaligned else i]: target[head, tokens[i]] for n, i in enumerate(similar)}
        assert set(np.flatnonzero(got[head])) == set(pairs)
        assert all(got_target[head, t] == pairs[t] for t in pairs)


# --- decoding -------------------------------------------------------------------------------------------------------

STEPPING = [
    policies.TOVA(keep=0.5),
    policies.H2O(keep=0.5),
    policies.RoCo(keep=0.5, recent=2),
    policies.PrefixKV(keep=0.5, distance=3),
    policies.AVL(keep=0.5, core=0.4, refresh=1, text=0.2),
]
E_SLOTS = 14


def state_of(rng, policy) -> DecodeState:
    """Entries of 12 different tokens of 24 in each head, in any order of slots."""
    place, rank, stored = np.zeros((3, K, E_SLOTS), np.int32)
    values = {name: rng.random((K, E_SLOTS)).astype(np.float32) for name in ("mass", "mean", "square", "rows")}
    for head in range(K):
        tokens, slots = np.sort(rng.permutation(24)[:12]), rng.permutation(E_SLOTS)[:12]
        place[head, slots], rank[head, slots], stored[head, slots] = tokens, np.arange(12), 1
    count = np.full(K, 11, np.int32)
    return DecodeState(
        stored=stored > 0, attended=stored > 0, is_text=place >= 12, place=place, rank=rank, values=values,
        slots=np.full(K, E_SLOTS), budget=count, vision=np.int32(12), text=np.int32(12), steps=np.int32(2),
        counted=np.int32(12), core=stored > 0 if isinstance(policy, policies.AVL) else None,
        core_only=np.array(False) if isinstance(policy, policies.AVL) else None, new_tokens=8, reuses=True,
    )  # fmt: skip


def places_of(state, mask) -> list[set[int]]:
    return [set(np.asarray(state.place)[h][np.asarray(mask)[h]].tolist()) for h in range(K)]


@pytest.mark.parametrize("policy", STEPPING, ids=lambda policy: type(policy).__name__)
def test_a_step_does_not_depend_on_the_order_of_slots(policy):
    rng, step = np.random.default_rng(0), jax.jit(policy.step)
    for _ in range(6):
        state, mass = state_of(rng, policy), rng.random((N, E_SLOTS)).astype(np.float32)
        order = rng.permutation(E_SLOTS)

        def moved(x, rows, order=order):
            x = np.array(x)
            x[rows] = x[rows][:, order]
            return x

        names = ("stored", "attended", "is_text", "place", "rank", "core")
        arrays = {name: moved(x, [1]) for name in names if (x := getattr(state, name)) is not None}
        values = {name: moved(x, [1]) for name, x in state.values.items()}
        other = dataclasses.replace(state, **arrays, values=values)
        a, b = step(state, mass), step(other, moved(mass, [2, 3]))  # of the queries of head 1
        for name in ("stored", "attended", "core"):
            if getattr(a, name) is not None:
                assert places_of(a, getattr(a, name)) == places_of(b, getattr(b, name)), name


def test_tova_evicts_by_the_mean_of_each_token():
    """A head that does not hold a token gives it nothing."""
    rng, policy = np.random.default_rng(1), policies.TOVA(keep=0.5)
    step = jax.jit(policy.step)
    for _ in range(6):
        state, mass = state_of(rng, policy), rng.random((N, E_SLOTS)).astype(np.float32)
        by_head = mass.astype(np.float64).reshape(K, -1, E_SLOTS).mean(axis=1)
        total = np.zeros(24)
        for head in range(K):
            total[state.place[head][state.stored[head]]] += by_head[head][state.stored[head]]
        after = places_of(state, step(state, mass).stored)
        for head, tokens in enumerate(places_of(state, state.stored)):
            assert tokens - after[head] == {min(tokens, key=lambda t: total[t])}


def test_the_core_is_a_share_of_what_keep_counts():
    rng, policy = np.random.default_rng(2), policies.AVL(keep=0.5, core=0.4)
    state = dataclasses.replace(state_of(rng, policy), counted=np.int32(5), vision=np.int32(12))
    core = jax.jit(policy.pick)(state, rng.random((K, E_SLOTS)).astype(np.float32))
    assert (np.asarray(core).sum(axis=1) == 2).all()


def test_keep_and_core_count_the_tokens_that_a_reduction_leaves():
    """A prompt of which a reduction has left 10 of 20 vision tokens."""
    q, k, v, _ = drawn(layers=1)
    vision = np.arange(30) < 20
    policy = compose(policies.AVL(keep=0.6, core=0.3), reduce=policies.FastV(keep=0.5, layer=1))
    source = np.r_[np.arange(0, 20, 2), np.arange(20, 30)]
    ones = jnp.ones((1, 20), bool)
    layer = Layer(
        **{name: jnp.asarray(x[0, :, :20])[None] for name, x in zip("qkv", (q, k, v), strict=True)},
        is_vision=jnp.asarray(vision[source])[None], valid=ones,
        run=LayerRun(is_candidate=ones, source=jnp.asarray(source)[None]),
    )  # fmt: skip
    prompt = Prompt(
        layers=(layer, layer), is_vision=jnp.asarray(vision)[None], valid=jnp.ones((1, 30), bool),
        next_position=jnp.full((1, 1), 30), logits=jnp.zeros((1, 2)),
        bounds=Bounds(vision=20, text=10, instruction=10), reducer=policies.slots_of(policy).reduce,
    )  # fmt: skip
    cache = jax.jit(fill_cache, static_argnames="new_tokens")(prompt, policy, new_tokens=2)
    state = cache.decode_states
    assert (np.asarray(state.stored & ~state.is_text).sum(axis=-1) == 6).all()
    assert (np.asarray(state.core).sum(axis=-1) == 3).all()


@pytest.mark.parametrize("allocate", [policies.PyramidKV, policies.AdaKV])
def test_the_recent_share_is_that_of_each_budget(allocate):
    """H2O keeps half of the budget of a layer and head, as it does while decoding."""
    q, k, v, vision = drawn()
    h2o = policies.H2O(keep=0.3)
    chosen, plain = (select(p, q, k, v, vision) for p in (compose(h2o, allocate=allocate), h2o))
    counts, scores = np.asarray(chosen.budgets), np.asarray(plain.scores)
    assert len(set(counts.ravel().tolist())) > 2
    for layer in range(L):
        for head in range(K):
            count = counts[layer, head]
            recent = np.arange(T) >= T - count // 2
            others = sorted(np.flatnonzero(~recent), key=lambda t: -scores[layer, head, t])[: count - count // 2]
            assert set(np.flatnonzero(chosen.kept[layer, head])) == set(np.flatnonzero(recent)) | set(others)


# --- capacity -------------------------------------------------------------------------------------------------------


def arrays_of(seed: int, length: int):
    q, k, v, vision = drawn(seed, layers=1)
    return {"q": q[0, :, :length], "k": k[0, :, :length], "v": v[0, :, :length], "is_vision": vision[:length]}


@pytest.mark.parametrize(
    ("policy", "length"),
    [
        (policies.PrefixKV(keep=0.5, distance=2), 30),
        (policies.AVL(keep=0.5, text=0.9), 30),
        (policies.H2O(budget=20), 12),
    ],
    ids=["PrefixKV", "AVL", "H2O"],
)
@pytest.mark.default("PrefixKV", "AVL")
def test_a_cache_that_is_resized_has_the_slots_of_one_that_was_made_larger(policy, length):
    """Also in a model with sliding windows, whose rings are resized too."""
    arrays = arrays_of(0, length)
    few, many = (one_layer(policy, arrays, new_tokens=n)[0] for n in (2, 60))
    ring = Ring(k=jnp.zeros((1, K, 4, H)), v=jnp.zeros((1, K, 4, H)), place=jnp.full((1, 4), -1), window=4)
    rings = Rings(layers=(ring,), first_new=jnp.array([length]), new_tokens=2)
    for resized in (resize(few, 60), resize(dataclasses.replace(few, rings=rings), 60)):
        assert resized.new_tokens == 60
        np.testing.assert_array_equal(resized.decode_states.slots[0], many.decode_states.slots[0])
        np.testing.assert_array_equal(resized.extent, many.extent)


def test_entries_stay_when_their_segments_move(params, batch):
    """Of two layers, of which the second moves."""
    few, _ = programs.prefill(params, batch, policies.PrefixKV(keep=0.5, distance=2), new_tokens=2)
    more = resize(few, 60)
    assert (more.start[1] > few.start[1]).any()
    for place in np.ndindex(few.start.shape):
        _, row, head = place
        for old, new in ((few.k, more.k), (few.v, more.v), (few.token, more.token)):
            held, moved = (
                np.asarray(pool)[row, head, cache.start[place] :][: int(few.counts[place])]
                for pool, cache in ((old, few), (new, more))
            )
            np.testing.assert_array_equal(moved, held)


@pytest.mark.parametrize("cls", [policies.H2O, policies.TOVA, policies.RoCo])
def test_a_budget_is_filled_after_a_short_prompt(cls):
    policy, rng = cls(budget=16), np.random.default_rng(0)
    state = dataclasses.replace(state_of(rng, policy), budget=np.array([12, 9]), counted=np.int32(12), new_tokens=3)
    begun = policy.begin(state)
    np.testing.assert_array_equal(begun.budget, [16, 9])  # the second head has dropped tokens: its budget is spent
    assert policy.decode_bounds(12, 12, layers=1, vision=0, text=12, new_tokens=3) == (16, 16)
    if cls is not policies.TOVA:
        return
    cache, step = one_layer(policy, arrays_of(0, 12), new_tokens=6)
    new = 2 * rng.normal(size=(6, N + 2 * K, H)).astype(np.float32)
    for i, want in enumerate((13, 14, 15, 16, 16, 16)):
        cache, *_ = step(cache, new[i, :N], new[i, N : N + K], new[i, N + K :])
        assert (np.asarray(cache.decode_states.stored[0]).sum(axis=-1) == want).all()
