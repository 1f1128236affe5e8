"""Log-probabilities of given tokens, and the capacity of a tail: against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.models import embed
from vlkv import policies

fill_cache = programs.fill_cache
FORCED = np.random.default_rng(3).integers(6, 50, (3, 7))


@pytest.fixture(scope="module")
def prompts(params, batch):
    """The float64 prefill of every row, without its padding."""
    x = np.asarray(embed(params, batch))
    return [reference.prefill(params.decoder, x[row, batch.valid[row]]) for row in range(3)]


def kept_entries(cache, batch, row: int) -> np.ndarray:
    """[L, K, T] over the row's own tokens, read from the cache's slots; every slot in use holds one entry once."""
    token, start, length = (np.asarray(x) for x in (cache.token, cache.start, cache.counts))
    layers, _, heads = start.shape
    kept = np.zeros((layers, heads, batch.valid.shape[1]), bool)
    for layer in range(layers):
        for head in range(heads):
            begin = start[layer, row, head]
            assert begin % 16 == 0
            tokens = token[row, head % token.shape[1], begin : begin + length[layer, row, head]]
            assert (tokens >= 0).all() and len(set(tokens)) == len(tokens)
            vision = np.asarray(batch.is_vision)[row, tokens]
            assert not (np.diff(vision.astype(int)) > 0).any(), "vision entries come first"
            kept[layer, head, tokens] = True
    assert not kept[:, :, ~batch.valid[row]].any(), "padding never gets a slot"
    return kept[:, :, batch.valid[row]]


@pytest.mark.default("SnapKV")
@pytest.mark.parametrize(
    "policy", [policies.AirCache(keep=0.1), policies.SnapKV(keep=0.3)], ids=lambda p: type(p).__name__
)
def test_score_is_the_log_probability_of_the_reference(params, batch, read, prompts, policy):
    targets = FORCED.copy()
    targets[1, 4:] = -1  # a shorter continuation
    ours = np.asarray(programs.score(params, batch, targets, policy))
    cache = fill_cache(read, policy, new_tokens=8)
    for row in range(3):
        first, layers = prompts[row]
        kept = kept_entries(cache, batch, row)
        logits = np.concatenate([first[None], reference.decode(params.decoder, layers, kept, FORCED[row, :-1])])
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        theirs = np.where(targets[row] >= 0, log_p[np.arange(7), targets[row]], 0.0)
        np.testing.assert_allclose(ours[row], theirs, atol=1e-4)


def test_greedy_takes_the_first_of_the_largest_logits():
    x = np.random.default_rng(0).integers(-9, 9, (5, 1003)).astype(np.float32)
    x[1], x[2, 40:], x[3, -1] = -np.inf, np.inf, 100
    choose = jax.jit(lambda x: vlkv.Greedy().choose(30 * jnp.tanh(x / 30), None))  # capped, as in Gemma
    assert choose(x).tolist() == np.argmax(x, axis=1).tolist()
    x[4, 7] = np.nan
    assert 0 <= int(choose(x)[4]) < 1003  # an index; `decode` makes -1 of it
