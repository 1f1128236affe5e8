"""Methods that use more of the model than queries, keys and values, against float64 numpy with the model's weights."""

import jax
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.models import embed
from tests.policies import numpy_policies
from vlkv import analysis, policies

EXPECTED = policies.ExpectedAttention(keep=0.4, ahead=20, sinks=2)
CRITICAL = policies.CriticalKV(keep=0.4, window=3, kernel=3)
read, choose = programs.read_prompt, jax.jit(analysis.choose)


def rows(params, batch, policy):
    """Of each row: which tokens are valid, its layers in float64 (q, k, v with heads first), kept tokens and scores."""
    chosen = choose(read(params, batch, policy), policy)
    x = np.asarray(embed(params, batch))
    for row, valid in enumerate(batch.valid):
        _, layers = reference.prefill(params.decoder, x[row, valid], batch.positions[row, valid][:, 0])
        heads_first = [tuple(np.swapaxes(a, 0, 1) for a in layer) for layer in layers]
        yield valid, heads_first, np.asarray(chosen.kept)[row], np.asarray(chosen.scores)[row]


def as_complex(x):
    """The channel pairs (i, i + H/2) as complex numbers."""
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def split(z):
    """The inverse of `as_complex`."""
    return np.concatenate([z.real, z.imag], axis=-1)


def expected_attention(q, k, v, theta, ahead, sinks):
    """Scores of the tokens after the sinks; queries are rotated by complex numbers."""
    length, half = q.shape[1], q.shape[-1] // 2
    angle = np.arange(length + ahead)[:, None] * theta ** (-np.arange(half) / half)
    future = np.exp(1j * angle[length:]).mean(axis=0)
    before = as_complex(q) * np.exp(-1j * angle[:length])
    scores = np.zeros((len(k), length))
    group = len(q) // len(k)
    for head, queries in enumerate(before[:, sinks:]):
        mu = queries.mean(axis=0)
        rotated = split((queries - mu) * future)  # R is linear, so the covariance of R q is R Sigma R^T
        covariance = rotated.T @ rotated / len(rotated)
        keys = k[head // group, sinks:]
        logits = keys @ split(mu * future) / np.sqrt(2 * half)
        logits += np.einsum("ti,ij,tj->t", keys, covariance, keys) / (4 * half)
        e = np.exp(logits - logits.max())
        scores[head // group, sinks:] += e / e.sum() / group
    return scores * np.linalg.norm(v, axis=-1)


def test_expected_attention(params, batch):
    theta = params.decoder.rope.theta
    for valid, layers, kept, scored in rows(params, batch, EXPECTED):
        budgets = numpy_policies.uniform(numpy_policies.total_budget(len(layers), valid.sum(), 0.4), len(layers))
        for i, (q, k, v) in enumerate(layers):
            scores = expected_attention(q, k, v, theta, EXPECTED.ahead, EXPECTED.sinks)
            first = np.arange(valid.sum()) < EXPECTED.sinks
            np.testing.assert_allclose(scored[i][:, valid][:, ~first], scores[:, ~first], rtol=1e-3)
            for head, found in enumerate(scores):
                wanted = numpy_policies.take(found, np.ones(valid.sum(), bool), first, budgets[i])
                np.testing.assert_array_equal(kept[i, head, valid], wanted)


def test_critical_kv(params, batch):
    weights = [np.asarray(layer.out.weight[...], np.float64) for layer in params.decoder.layers]  # [D, N, H]
    for valid, layers, kept, _ in rows(params, batch, CRITICAL):
        prompt = numpy_policies.Prompt(
            np.stack([x[0] for x in layers]), np.stack([x[1] for x in layers]), np.zeros(valid.sum(), bool), "all", 0.4
        )
        _, budgets, scores = numpy_policies.snapkv(prompt, window=3, kernel=3)
        window = prompt.place >= prompt.tokens - 3
        for i, (q, _, v) in enumerate(layers):
            group = len(q) // len(v)
            norms = np.abs(np.einsum("dnh,nth->ntd", weights[i], np.repeat(v, group, axis=0))).sum(axis=-1)
            norms = numpy_policies.per_key_head(norms, len(v))
            for head, attended in enumerate(scores[i]):
                left = budgets[i] - 3
                best = numpy_policies.best(attended, ~window, left // 2)
                product = (attended / 3 + 1e-4) * norms[head]
                wanted = window | best | numpy_policies.best(product, ~window & ~best, left - left // 2)
                np.testing.assert_array_equal(kept[i, head, valid], wanted)


def test_kvzip(params, batch):
    """Images are repeated as their embeddings; rows are padded on either side."""
    instruction = 7, 9, 11
    policy = policies.KVzip(keep=0.4, sinks=2, instruction=instruction)
    chosen = choose(read(params, batch, policy), policy)
    x, said = np.asarray(embed(params, batch)), np.asarray(params.decoder.embedding.weight[...])[np.array(instruction)]
    for row, valid in enumerate(batch.valid):
        own, positions = x[row, valid], batch.positions[row, valid][:, 0]
        length, begin = valid.sum(), positions.max() + 1
        again = begin + 3 + positions
        _, layers = reference.prefill(
            params.decoder, np.concatenate([own, said, own]), np.concatenate([positions, begin + np.arange(3), again])
        )
        found = []
        for q, k, _ in layers:
            each = numpy_policies.attention(np.swapaxes(q, 0, 1), np.swapaxes(k, 0, 1))[:, length:, :length]
            found.append(each.max(axis=1).reshape(k.shape[1], -1, length).max(axis=1))
        np.testing.assert_allclose(np.asarray(chosen.scores)[row][..., valid], found, rtol=1e-3, atol=1e-6)
        # One order of all layers and heads besides the sinks.
        found = np.array(found)
        total = found.shape[1] * numpy_policies.total_budget(len(found), length, 0.4)
        kept = np.asarray(chosen.kept)[row][..., valid]
        assert kept.sum() == total and kept[..., :2].all()
        best = np.sort(found[..., 2:].ravel())[::-1][total - 2 * len(found) * found.shape[1] - 1]
        np.testing.assert_array_equal(kept[..., 2:], found[..., 2:] >= best)


def test_a_repeated_prompt_answers_as_one_that_is_read_once(params, batch):
    once, twice = (read(params, batch, policy) for policy in (policies.Full(), policies.KVzip(keep=0.5)))
    np.testing.assert_allclose(once.logits, twice.logits, atol=1e-5)
    assert (once.next_position == twice.next_position).all()


def test_what_is_missing_is_named(params, batch):
    q, k = (np.zeros((1, 2, 8, 4), np.float32) for _ in range(2))
    with pytest.raises(vlkv.InputError, match="ExpectedAttention uses more of the model"):
        policies.select(policies.ExpectedAttention(keep=0.5), q, k, k, np.zeros(8, bool))
    with pytest.raises(vlkv.InputError, match="give the policy to read_prompt"):
        choose(read(params, batch), CRITICAL)
    zipped = policies.KVzip(keep=0.5)
    with pytest.raises(vlkv.InputError, match="KVzip scores while the model repeats the prompt"):
        choose(read(params, batch), zipped)
    with pytest.raises(vlkv.InputError, match="has the id 99999, but the vocabulary has"):
        vlkv.prefill(params, batch, policies.KVzip(keep=0.5, instruction=(5, 99999)), new_tokens=1)
    with pytest.raises(vlkv.InputError, match="compose: FastV reduces the prompt, so it cannot be repeated"):
        policies.compose(zipped, reduce=policies.FastV(keep=0.5))
    with pytest.raises(vlkv.InputError, match="compose: SnapKV does not rank"):
        policies.compose(policies.H2O(keep=0.5), rank=policies.SnapKV)
