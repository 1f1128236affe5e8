"""Methods that select vision tokens by duplication and attention, against float64 numpy, one token at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.policies.arrays import observation, tokens_of
from tests.policies.numpy_policies import attention
from vlkv import policies
from vlkv.compression.checking import require_layers

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 8, 16
ROWS = (
    "SSVVVVVVVVVVVVVVVVVVVVVVVVVVVVVVVVVVIII.",
    ".SVVVVVVVVVVVVSVVVVVVVVVVVVVVVVVIIIIIII.",
    "VII.....................................",
)
reduce = jax.jit(lambda policy, tokens, obs, stage=0: policy.reduce(tokens, obs, stage=stage), static_argnames="stage")


def prompt(row, shift=0):
    """Tokens and the observation of a layer, with peaked attention; and the same in float64. `shift`: of all tokens."""
    text, rng = np.array(list(ROWS[row])), np.random.default_rng(row)
    length = len(text)
    x = rng.normal(size=(length, WIDTH)).astype(np.float32)
    tower = np.repeat(rng.random((1, 3, length)).astype(np.float32), 2, axis=0)  # of the first block and the last
    q, k = (2 * rng.normal(size=(n, length, HEAD_DIM)).astype(np.float32) for n in (HEADS, KV_HEADS))
    text, x, tower, q, k = (np.roll(y, shift, axis) for y, axis in ((text, 0), (x, 0), (tower, 2), (q, 1), (k, 1)))
    valid, vision = text != ".", text == "V"
    patch = np.where(vision, vision.cumsum() - 1, -1)
    grid = np.stack([np.where(vision, 0, -1), np.where(vision, patch // 6, -1), np.where(vision, patch % 6, -1)], 1)
    tokens = tokens_of(x, grid, valid=valid, positions=np.arange(length)[:, None], tower=tower)
    obs = observation(tokens, q, k)
    x = np.float64(x)
    cosine = x @ x.T / np.linalg.norm(x, axis=1) / np.linalg.norm(x, axis=1)[:, None]
    return tokens, obs, valid, vision, cosine, np.float64(tower[0]).mean(axis=0), np.float64(q), np.float64(k)


def half_up(share, count):
    return min(count, max(1, int(np.floor(share * count + 0.5))))


def pyramiddrop(policy, valid, vision, cosine, tower, q, k):
    scores = np.zeros(len(valid))
    scores[valid] = attention(q[:, valid], k[:, valid])[:, -1].mean(axis=0)
    best = sorted(np.flatnonzero(vision), key=lambda t: -scores[t])
    return best[: half_up(policy.keep ** (1 / len(policy.layers)), vision.sum())]


def divprune(policy, valid, vision, cosine, tower, q, k):
    left, chosen = list(np.flatnonzero(vision)), []
    while len(chosen) < half_up(policy.keep, vision.sum()):
        others = {t: [s for s in (chosen or left) if s != t] for t in left}
        chosen.append(max(left, key=lambda t: min((1 - cosine[t, s] for s in others[t]), default=9.0)))
        left.remove(chosen[-1])
    return chosen


def vispruner(policy, valid, vision, cosine, tower, q, k):
    count = half_up(policy.keep, vision.sum())
    important = int(policy.important * count)
    tokens = sorted(np.flatnonzero(vision), key=lambda t: -tower[t])
    kept, rest = tokens[:important], tokens[important:]
    while (removed := min(policy.each, len(rest) - (count - important), (len(rest) + 1) // 2)) > 0:
        even, odd = rest[::2], rest[1::2]
        even.sort(key=lambda t: -max((cosine[t, s] for s in odd), default=-9.0))
        rest = even[removed:] + odd
    return kept + rest


def dart(policy, valid, vision, cosine, tower, q, k):
    norm = np.abs(k).sum(axis=(0, 2))
    count, last = half_up(policy.keep, vision.sum()), np.flatnonzero(vision)[-1]
    own = sorted(np.flatnonzero(vision), key=lambda t: -norm[t])[: min(policy.vision_pivots, count)]
    text = [t for t in np.flatnonzero(valid) if t > last]
    pivots = own + sorted(text, key=lambda t: -norm[t])[: policy.text_pivots]
    kept, left = list(own), count - len(own)
    for i, pivot in enumerate(pivots):
        free = sorted((t for t in np.flatnonzero(vision) if t not in kept), key=lambda t: cosine[pivot, t])
        kept += free[: left // len(pivots) + (i < left % len(pivots))]
    return kept


def cdpruner(policy, valid, vision, cosine, tower, q, k):
    """The authors' loop, with the whole kernel."""
    own, count = np.flatnonzero(vision), half_up(policy.keep, vision.sum())
    text = [t for t in np.flatnonzero(valid) if t > own[-1]]
    relevance = cosine[own][:, text].mean(axis=1) if text else np.ones(len(own))
    if text:
        relevance = (relevance - relevance.min() + 1e-6) / (relevance.max() - relevance.min() or 1.0)
    kernel = relevance[:, None] * cosine[np.ix_(own, own)] * relevance
    squares, found, chosen = kernel.diagonal().copy(), np.zeros((count, len(own))), []
    for i in range(count):
        j = int(squares.argmax())
        chosen.append(j)
        found[i] = (kernel[j] - found[:i, j] @ found[:i]) / np.sqrt(squares[j])
        squares -= found[i] ** 2
        squares[chosen] = -np.inf
    return own[chosen]


METHODS = {
    policies.CDPruner(keep=0.3): cdpruner,
    policies.PyramidDrop(keep=0.3, layers=(1, 2)): pyramiddrop,
    policies.DivPrune(keep=0.3): divprune,
    policies.VisPruner(keep=0.3): vispruner,
    policies.VisPruner(keep=0.25, important=0.2, each=3): vispruner,
    policies.DART(keep=0.4): dart,
    policies.DART(keep=0.05, text_pivots=0): dart,
}


@pytest.mark.parametrize("policy", METHODS, ids=repr)
def test_the_tokens_are_those_of_the_equations(policy):
    for row in range(len(ROWS)):
        check(policy, row)


def check(policy, row):
    tokens, obs, *arrays = prompt(row)
    valid, vision = arrays[:2]
    _, kept = reduce(policy, tokens, obs)
    np.testing.assert_array_equal(np.asarray(kept)[~vision], valid[~vision])
    np.testing.assert_array_equal(np.flatnonzero(kept & vision), sorted(METHODS[policy](policy, *arrays)))


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_visionzip(row):
    policy = policies.VisionZip(keep=0.4, contextual=0.4)
    tokens, obs, valid, vision, cosine, tower, *_ = prompt(row)
    changed, kept = reduce(policy, tokens, obs)
    x, count = np.float64(tokens.x), half_up(0.4, vision.sum())
    groups = int(0.4 * count)
    dominant = sorted(np.flatnonzero(vision), key=lambda t: -tower[t])[: count - groups]
    rest = [t for t in np.flatnonzero(vision) if t not in dominant]
    targets = rest[:: max(1, len(rest) // max(groups, 1))][:groups]
    members = {t: [] for t in targets}
    for t in rest:
        if targets and t not in targets:
            members[max(targets, key=lambda s: cosine[t, s])].append(t)
    wanted, size = x.copy(), np.ones(len(x))
    for t, others in members.items():
        size[t] += len(others)
        if others:
            wanted[t] = x[t] + x[others].mean(axis=0)
    np.testing.assert_array_equal(np.flatnonzero(kept & vision), sorted(dominant + targets))
    np.testing.assert_array_equal(np.asarray(kept)[~vision], valid[~vision])
    np.testing.assert_allclose(np.asarray(changed.x)[kept], wanted[kept], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(changed.size)[kept], size[kept])


@pytest.mark.parametrize("plus", [True, False])
def test_prumerge(plus):
    policy = policies.PruMerge(keep=0.3, plus=plus)
    for row in range(len(ROWS)):
        tokens, obs, valid, vision, cosine, tower, *_ = prompt(row)
        if row == 0:  # three outliers
            tower[[5, 6, 20]] += 2
            tokens = dataclasses.replace(tokens, tower=jnp.asarray(tower, jnp.float32)[None, None])
        changed, kept = reduce(policy, tokens, obs)
        own, count = np.flatnonzero(vision), half_up(0.3, vision.sum())
        low, high = np.quantile(tower[vision], [0.25, 0.75])
        outliers = sorted(own, key=lambda t: -tower[t])[: max(1, (tower[vision] > high + 1.5 * (high - low)).sum())]
        wanted = outliers[:count]
        rest = [t for t in own if t not in wanted]
        if plus:
            left = count - len(wanted)
            wanted = wanted + [rest[i * len(rest) // left] for i in range(left)]
        x = np.float64(tokens.x)
        for t in wanted:
            near = [s for s in own if s not in wanted and max(wanted, key=lambda c: cosine[s, c]) == t]
            np.testing.assert_allclose(
                changed.x[t], np.average(x[[t, *near]], axis=0, weights=tower[[t, *near]]), atol=1e-5
            )
            assert changed.size[t] == 1 + len(near)
        np.testing.assert_array_equal(np.flatnonzero(kept & vision), sorted(wanted))
        np.testing.assert_array_equal(np.asarray(kept)[~vision], valid[~vision])


def test_cdpruner_begins_a_new_round_when_the_selected_tokens_span_all():
    """Three directions, four times each, ever less relevant: a round takes one token of each direction."""
    tokens, obs, *_ = prompt(0)
    vision, text = np.arange(40) < 12, np.arange(40) == 12
    x = np.zeros((40, 16))
    x[:12] = np.tile(np.eye(16)[:3], (4, 1))
    x[:12, 5] = np.repeat([0.4, 0.3, 0.2, 0.1], 3)
    x[:12, 6:9] = 1e-5 * np.random.default_rng(0).normal(size=(12, 3))
    x[12, 5] = 1
    arrays = {"x": jnp.asarray(x, jnp.float32), "is_vision": jnp.asarray(vision), "valid": jnp.asarray(vision | text)}
    tokens = dataclasses.replace(tokens, **arrays)
    for count in (3, 12):
        kept = np.asarray(reduce(policies.CDPruner(keep=count / 12), tokens, obs)[1])
        assert kept[:12].sum() == count and kept[12] and not kept[13:].any()
        assert kept[:3].all()


def test_pyramiddrop_halves_the_image_three_times_by_default():
    policy = policies.PyramidDrop(keep=0.125)
    assert policy.reductions(32) == (8, 16, 24) and policy.share == 0.5
    assert policy.reductions(6) == (1, 3, 4)
    with pytest.raises(vlkv.InputError, match="layers"):  # no three stages fit into three layers
        require_layers(policy, 3)
    assert policy.remaining(stage=0, vision=576, images=1) == 288


def test_downsample_by_hand():
    """Text, 2 x 3 patches, a newline after each line, text, an image of 1 x 1, padding; a patch stands for three."""
    grid = [(-1, -1, -1), (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, -1, -1), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, -1, -1),
            (-1, -1, -1), (1, 0, 0), (-1, -1, -1)]  # fmt: skip
    x = jnp.arange(12.0)[:, None] * jnp.array([[1.0, 10.0]])
    tokens = tokens_of(x, grid, valid=np.arange(12) < 11, size=np.where(np.arange(12) == 2, 3, 1))
    made, kept = reduce(policies.Downsample(), tokens, None)
    assert np.flatnonzero(kept).tolist() == [0, 1, 3, 4, 8, 9, 10]
    values = dict(zip(np.flatnonzero(kept).tolist(), np.asarray(made.x)[np.asarray(kept), 0].tolist(), strict=True))
    assert values == {0: 0, 1: (1 + 3 * 2 + 5 + 6) / 6, 3: (3 + 7) / 2, 4: 4, 8: 8, 9: 9, 10: 10}
    assert np.asarray(made.size)[[0, 1, 3, 4, 10]].tolist() == [1, 6, 2, 1, 1]
    assert np.asarray(made.grid)[[1, 3, 4]].tolist() == [[0, 0, 0], [0, 0, 1], [0, -1, -1]]
    np.testing.assert_array_equal(made.positions, tokens.positions)
    np.testing.assert_allclose(made.x[:, 1], 10 * made.x[:, 0])

    assert policies.Downsample().keep == 0.25 and policies.Downsample(side=3).keep == 1 / 9
    assert policies.Downsample(most=144).remaining(stage=0, vision=576, images=1) == 144


reduce_sparsevlm = jax.jit(
    lambda policy, tokens, obs, stage: policy.reduce(tokens, obs, stage=stage), static_argnames="stage"
)


def raters(x, valid, vision):
    text = np.flatnonzero(valid & (np.arange(len(x)) > np.flatnonzero(vision)[-1]))
    if len(text) < 2:  # nothing is above the average
        return text if len(text) else np.flatnonzero(valid)[-1:]
    logits = x[vision] @ x[text].T
    share = np.exp(logits - logits.max(axis=1, keepdims=True))
    share = (share / share.sum(axis=1, keepdims=True)).mean(axis=0)
    return text[share > share.mean()]


def clusters(x, count):
    """Centres and the centre of each point, by loops over pairs."""
    distance = np.linalg.norm(x[:, None] - x, axis=-1) / np.sqrt(x.shape[1])
    density = np.exp(-(np.sort(distance, axis=1)[:, :count] ** 2).mean(axis=1))
    apart = np.full(len(x), distance.max())
    for i in range(len(x)):
        denser = [j for j in range(len(x)) if (density[j], -j) > (density[i], -i)]
        apart[i] = min((distance[i, j] for j in denser), default=apart[i])
    centres = sorted(range(len(x)), key=lambda i: -(density * apart)[i])[:count]
    return centres, [i if i in centres else min(centres, key=lambda c: distance[i, c]) for i in range(len(x))]


def expected(policy, tokens, valid, vision, q, k):
    """Kept vision tokens, and all hidden states and sizes."""
    x = np.float64(tokens.x)
    rows = raters(x, valid, vision)
    weights = np.zeros((len(x), len(x)))
    weights[np.ix_(valid, valid)] = attention(q[:, valid], k[:, valid]).mean(axis=0)
    own, rated = np.flatnonzero(vision), weights[rows][:, vision]
    count = half_up(policy.share, len(own))
    if policy.number == "rank":
        values = np.linalg.svd(rated, compute_uv=False)
        count = max(1, min(count, (values > values.max() * max(rated.shape) * 2.0**-23).sum()))
    removed = len(own) - count
    recycled = int(policy.recycled * removed) + 1
    groups = min(int(policy.clusters * recycled) + 1, count - 1, recycled)
    if not (policy.recycled and removed and groups):
        recycled = groups = 0
    order = own[np.argsort(-rated.sum(axis=0), kind="stable")]
    best, pool = order[: count - groups], np.sort(order[count - groups :][:recycled])
    size, changed, centres = np.ones(len(x)), x.copy(), []
    if groups:
        centres, target = clusters(x[pool], groups)
        for centre in centres:
            members = pool[np.flatnonzero(np.array(target) == centre)]
            changed[pool[centre]], size[pool[centre]] = x[members].mean(axis=0), len(members)
    return np.sort([*best, *pool[centres]]).astype(int), changed, size


POLICIES = (
    policies.SparseVLM(keep=0.4, layers=(1,)),
    policies.SparseVLM(keep=0.2, layers=(1, 2)),
    policies.SparseVLM(keep=0.3, layers=(1,), recycled=0.9, clusters=0.4),
    policies.SparseVLM(keep=0.3, layers=(1,), recycled=0.0),
    policies.SparseVLM(keep=0.5, layers=(1,), number="rank"),
)


@pytest.mark.default("rank", "keep=0.4")
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_tokens_are_those_of_the_paper(policy):
    for row in range(len(ROWS)):
        tokens, obs, valid, vision, _, _, q, k = prompt(row)
        tokens, kept = reduce_sparsevlm(policy, tokens, None, 0)
        np.testing.assert_array_equal(kept, valid)
        np.testing.assert_array_equal(np.flatnonzero(tokens.marked), raters(np.float64(tokens.x), valid, vision))
        changed, kept = reduce_sparsevlm(policy, tokens, obs, 1)
        wanted, x, size = expected(policy, tokens, valid, vision, q, k)
        np.testing.assert_array_equal(np.asarray(kept)[~vision], valid[~vision])
        np.testing.assert_array_equal(np.flatnonzero(kept & vision), wanted)
        np.testing.assert_allclose(np.asarray(changed.x)[kept], x[kept], atol=1e-5)
        np.testing.assert_array_equal(np.asarray(changed.size)[kept], size[kept])


def test_raters_that_attend_alike_leave_one_token():
    tokens, obs, *_ = prompt(0)
    q = np.array(obs.q)
    q[:, -4:] = q[:, -4:-3]
    tokens, _ = reduce_sparsevlm(policies.SparseVLM(keep=0.5, layers=(1,)), tokens, None, 0)
    obs = dataclasses.replace(obs, q=jnp.asarray(q))
    _, kept = reduce_sparsevlm(policies.SparseVLM(keep=0.5, layers=(1,), number="rank"), tokens, obs, 1)
    assert (kept & tokens.is_vision).sum() == 1


def test_sparsevlm_has_the_stages_of_the_paper():
    policy = policies.SparseVLM(keep=0.125)
    assert policy.reductions(32) == (0, 3, 7, 16) and policy.share == 0.5
    assert [policy.remaining(stage=s, vision=576, images=1) for s in (0, 1)] == [576, 288]
    assert policy.reductions(4) == (0, 1, 2, 3)
    with pytest.raises(vlkv.InputError, match="layers"):
        policies.SparseVLM(keep=0.5, layers=())
