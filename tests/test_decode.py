"""After compression, decoding attends to exactly the kept entries: against float64 numpy, for every policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from vlkv import policies

from . import reference
from .models import tiny_llava, unequal_batch

FORCED = np.random.default_rng(3).integers(6, 50, (3, 7))
PLAN = [policies.Full()]
for _name in policies.registry:
    if _name != "full":
        PLAN += [policies.make(_name, keep=0.3, scope="all"), policies.make(_name, keep=0.15, scope="vision")]


@pytest.fixture(scope="module")
def params():
    return tiny_llava()


@pytest.fixture(scope="module")
def batch():
    return unequal_batch(padding="left")


@pytest.fixture(scope="module")
def prompts(params, batch):
    """The float64 prefill of every row, without its padding."""
    x = np.asarray(params.embed(jax.tree.map(jnp.asarray, batch)))
    return [reference.prefill(params.decoder, x[row, batch.valid[row]]) for row in range(3)]


def kept_entries(cache, batch, row: int) -> np.ndarray:
    """[L, K, T] over the row's own tokens, read from the cache's slots; every slot in use holds one entry once."""
    token, start, length = (np.asarray(x) for x in (cache.token, cache.start, cache.length))
    layers, _, heads = start.shape
    kept = np.zeros((layers, heads, batch.valid.shape[1]), bool)
    for layer in range(layers):
        for head in range(heads):
            begin = start[layer, row, head]
            assert begin % 16 == 0
            tokens = token[row, begin : begin + length[layer, row, head], head]
            assert (tokens >= 0).all() and len(set(tokens)) == len(tokens)
            vision = np.asarray(batch.is_vision)[row, tokens]
            assert not (np.diff(vision.astype(int)) > 0).any(), "vision entries come first"
            kept[layer, head, tokens] = True
    assert not kept[:, :, ~batch.valid[row]].any(), "padding never gets a slot"
    return kept[:, :, batch.valid[row]]


@pytest.mark.parametrize("policy", PLAN, ids=lambda p: f"{type(p).__name__}-{p.scope}")
def test_decoding_from_the_cache(params, batch, prompts, policy):
    key = jax.random.key(1)
    cache, logits = jax.jit(vlkv.prefill, static_argnames="new_tokens")(params, batch, policy, new_tokens=8, key=key)
    kept = [kept_entries(cache, batch, row) for row in range(3)]
    ours = [logits]
    step = jax.jit(vlkv.decode_step)
    for i in range(FORCED.shape[1]):
        cache, logits = step(params, cache, FORCED[:, i])
        ours.append(logits)
    ours = np.stack(ours, axis=1)
    for row in range(3):
        first, layers = prompts[row]
        theirs = np.concatenate([first[None], reference.decode(params.decoder, layers, kept[row], FORCED[row])])
        np.testing.assert_allclose(ours[row], theirs, atol=1e-4)
        check_selection(policy, layers, batch, row, kept[row])


def check_selection(policy, layers, batch, row, kept) -> None:
    """The seam `select`, given the row's own queries and keys, keeps what the cache holds."""
    if policy.needs_key:
        return  # it draws anew
    q, k, v = (np.stack([x.transpose(1, 0, 2) for x in y]).astype(np.float32) for y in zip(*layers, strict=True))
    is_vision = np.asarray(batch.is_vision)[row, batch.valid[row]]
    selection = policies.select(policy, q, k, v, is_vision)
    np.testing.assert_array_equal(selection.kept, kept)


@pytest.mark.parametrize(
    "policy", [policies.AirCache(keep=0.1), policies.SnapKV(keep=0.3)], ids=lambda p: type(p).__name__
)
def test_score_is_the_log_probability_of_the_reference(params, batch, prompts, policy):
    targets = FORCED.copy()
    targets[1, 4:] = -1  # a shorter continuation
    ours = np.asarray(jax.jit(vlkv.score)(params, batch, targets, policy))
    cache, _ = jax.jit(vlkv.prefill, static_argnames="new_tokens")(params, batch, policy, new_tokens=8)
    for row in range(3):
        first, layers = prompts[row]
        kept = kept_entries(cache, batch, row)
        logits = np.concatenate([first[None], reference.decode(params.decoder, layers, kept, FORCED[row, :-1])])
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        theirs = np.where(targets[row] >= 0, log_p[np.arange(7), targets[row]], 0.0)
        np.testing.assert_allclose(ours[row], theirs, atol=1e-4)


def test_past_the_tail_the_logits_are_nan_not_wrong(params, batch):
    cache, _ = jax.jit(vlkv.prefill, static_argnames="new_tokens")(params, batch, policies.Full(), new_tokens=1)
    step = jax.jit(vlkv.decode_step)
    cache, logits = step(params, cache, FORCED[:, 0])
    assert np.isfinite(logits).all()
    _, logits = step(params, cache, FORCED[:, 1])
    assert np.isnan(logits).all()
