"""SparseVLM: raters, ranking, numbers and clusters against float64 numpy, from the paper and the authors' code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.policies.numpy_policies import attention
from tests.policies.test_vision_selection import ROWS, half_up, prompt
from vlkv import policies

reduce = jax.jit(lambda policy, tokens, obs, stage: policy.reduce(tokens, obs, stage=stage), static_argnames="stage")


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
        tokens, kept = reduce(policy, tokens, None, 0)
        np.testing.assert_array_equal(kept, valid)
        np.testing.assert_array_equal(np.flatnonzero(tokens.marked), raters(np.float64(tokens.x), valid, vision))
        changed, kept = reduce(policy, tokens, obs, 1)
        wanted, x, size = expected(policy, tokens, valid, vision, q, k)
        np.testing.assert_array_equal(np.asarray(kept)[~vision], valid[~vision])
        np.testing.assert_array_equal(np.flatnonzero(kept & vision), wanted)
        np.testing.assert_allclose(np.asarray(changed.x)[kept], x[kept], atol=1e-5)
        np.testing.assert_array_equal(np.asarray(changed.size)[kept], size[kept])


def test_raters_that_attend_alike_leave_one_token():
    tokens, obs, *_ = prompt(0)
    q = np.array(obs.q)
    q[:, -4:] = q[:, -4:-3]
    tokens, _ = reduce(policies.SparseVLM(keep=0.5, layers=(1,)), tokens, None, 0)
    obs = dataclasses.replace(obs, q=jnp.asarray(q))
    _, kept = reduce(policies.SparseVLM(keep=0.5, layers=(1,), number="rank"), tokens, obs, 1)
    assert (kept & tokens.is_vision).sum() == 1


def test_sparsevlm_has_the_stages_of_the_paper():
    policy = policies.SparseVLM(keep=0.125)
    assert policy.reductions(32) == (0, 3, 7, 16) and policy.share == 0.5
    assert [policy.remaining(stage=s, vision=576, images=1) for s in (0, 1)] == [576, 288]
    assert policy.reductions(4) == (0, 1, 2, 3)
    with pytest.raises(vlkv.InputError, match="layers"):
        policies.SparseVLM(keep=0.5, layers=())
