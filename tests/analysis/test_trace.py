"""What a trace sees, against float64 numpy; and what is measured with it: errors, agreement, rankings, survival."""

import jax
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.generation.test_decode import kept_entries
from tests.models import embed, tiny_llava
from vlkv import analysis, policies

ANSWER = np.random.default_rng(4).integers(6, 50, (3, 6))
ANSWER[1, 4:] = -1
FED = np.maximum(ANSWER[:, :-1], 0)
SNAP = policies.SnapKV(keep=0.3)
fill_cache = programs.fill_cache
follow = jax.jit(analysis.follow)


@pytest.fixture(scope="module")
def params():
    return tiny_llava()


@pytest.fixture(scope="module")
def prompt(params, batch):
    return programs.read_prompt(params, batch)


@pytest.fixture(scope="module")
def full(params, prompt):
    cache = fill_cache(prompt, policies.Full(), new_tokens=7)
    return cache, follow(params, prompt, cache, ANSWER[:, :-1])


@pytest.fixture(scope="module")
def snap(params, prompt):
    cache = fill_cache(prompt, SNAP, new_tokens=7)
    return cache, follow(params, prompt, cache, ANSWER[:, :-1])


@pytest.fixture(scope="module")
def layers(params, batch):
    """Queries, keys and values of every row's prompt in float64, without its padding."""
    x = np.asarray(embed(params, batch))
    return [reference.prefill(params.decoder, x[row, batch.valid[row]])[1] for row in range(3)]


def watched(decoder, layers, kept, tokens):
    """Hidden states [S, L, D] and head-mean attention [S, L, T + S] of a decode from the entries kept [L, K, T]."""
    count = kept.shape[-1]
    hidden = np.zeros((len(tokens), len(layers), decoder.embedding.weight[...].shape[1]))
    mass = np.zeros((len(tokens), len(layers), count + len(tokens)))
    tails = [([], []) for _ in layers]
    for s, token in enumerate(tokens):
        x = np.asarray(decoder.embedding.weight[...], np.float64)[token][None]
        for i, (layer, (_, k, v), (new_k, new_v)) in enumerate(zip(decoder.layers, layers, tails, strict=True)):
            q, *new = reference._project(layer, x, np.array([count + s]), decoder.rope)
            new_k.append(new[0])
            new_v.append(new[1])
            keys, values = np.concatenate([k, *new_k]), np.concatenate([v, *new_v])
            seen = np.concatenate([kept[i], np.ones((k.shape[1], s + 1), bool)], axis=1)
            attended = np.empty_like(q)
            for n in range(q.shape[1]):
                head = n // (q.shape[1] // k.shape[1])
                logits = np.where(seen[head], keys[:, head] @ q[0, n] / np.sqrt(q.shape[-1]), -np.inf)
                weights = reference._softmax(logits)
                mass[s, i, : len(weights)] += weights / q.shape[1]
                attended[0, n] = weights @ values[:, head]
            x = reference._finish(layer, x, attended)
            hidden[s, i] = x[0]
    return hidden, mass


@pytest.mark.full
def test_a_trace_is_what_the_layers_do(params, batch, layers, full, snap):
    length = batch.valid.shape[1]
    hidden = {}
    for name, (cache, trace) in {"full": full, "snap": snap}.items():
        for row in range(3):
            valid, kept = batch.valid[row], kept_entries(cache, batch, row)
            expected = watched(params.decoder, layers[row], kept, FED[row])
            hidden[name, row] = expected[0]
            np.testing.assert_allclose(trace.hidden[:, :, row], expected[0], atol=2e-4)
            mass = np.asarray(trace.mass[:, :, row])
            np.testing.assert_allclose(mass[..., :length][..., valid], expected[1][..., : valid.sum()], atol=1e-5)
            np.testing.assert_allclose(mass[..., length : length + 5], expected[1][..., valid.sum() :], atol=1e-5)
            np.testing.assert_allclose(mass.sum(axis=-1), 1, atol=1e-5)
            theirs = reference.decode(params.decoder, layers[row], kept, FED[row])
            np.testing.assert_allclose(trace.logits[:, row], theirs, atol=1e-4)
            counts = kept.sum(axis=-1).mean(axis=1) + np.arange(1, 6)[:, None]
            np.testing.assert_allclose(trace.stored[:, :, row], counts, rtol=1e-6)
            np.testing.assert_array_equal(trace.stored, trace.used)
    error = analysis.feature_error(full[1], snap[1])
    for row in range(3):
        expected = abs(hidden["full", row] - hidden["snap", row]).mean(axis=-1)
        np.testing.assert_allclose(error[:, :, row], expected, atol=2e-4)


@pytest.mark.full
def test_agreement_and_log_probability(snap):
    logits = np.asarray(snap[1].logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    answer = np.array(ANSWER)
    answer[0, 3] = logits[2, 0].argmax()  # says it right once
    answer[2, 1:] = -1
    expected = [np.mean([log_p[i, row, answer[row, i + 1]] for i in range(n)]) for row, n in ((0, 5), (1, 3))]
    np.testing.assert_allclose(analysis.log_probability(snap[1].logits, answer), [*expected, 0], rtol=1e-4)
    right = [np.mean([logits[i, row].argmax() == answer[row, i + 1] for i in range(n)]) for row, n in ((0, 5), (1, 3))]
    assert right[0] >= 0.2
    np.testing.assert_allclose(analysis.agreement(snap[1].logits, answer), [*right, 1])


def test_pictures_of_a_grid():
    grid = np.array([[-1, -1, -1], [0, 0, 0], [0, 0, 1], [0, 1, 1], [1, -1, -1], [1, 0, 0]])  # a class token, too
    pictures = analysis.on_grid(np.array([[9, 1, 2, 3, 9, 4], [9, 0, 0, 1, 9, 1]]), grid)
    np.testing.assert_array_equal(pictures[0], [[[1, 2], [np.nan, 3]], [[0, 0], [np.nan, 1]]])
    np.testing.assert_array_equal(pictures[1], [[[4]], [[1]]])
    assert analysis.on_grid(np.zeros((2, 3)), np.full((3, 3), -1)) == []


def test_the_full_cache_does_not_differ_from_itself_in_any_row(params, batch):
    sampling = vlkv.Greedy(max_new_tokens=2, stop=())
    np.testing.assert_array_equal(vlkv.kl_to_full(params, batch, policies.Full(), sampling=sampling), np.zeros(3))
