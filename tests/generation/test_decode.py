"""After compression, decoding attends to exactly the kept entries: against float64 numpy, for every policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import reference
from tests.models import embed, tiny_llava, unequal_batch
from vlkv import policies

compress, select = jax.jit(policies.compress), jax.jit(policies.select)
fill_cache = jax.jit(vlkv.fill_cache, static_argnames="new_tokens")
FORCED = np.random.default_rng(3).integers(6, 50, (3, 7))
# What decoding attends to is compared with entries as the prompt made them, so methods that also act while decoding or
# merge do not do so here; tests/policies/ has those halves.
PREFILL_ONLY = {
    "h2o": {"evict": False},
    "avl": {"core": None},
    "prefixkv": {"distance": None},
    "elasticcache": {"merging": "none", "distance": None},
    "roco": {"evict": False},
    "lookm": {"merging": "none"},
}


BOTH_SCOPES = ("adakv", "aircache", "avl", "prefixkv", "snapkv")


def plan():
    yield policies.Full()
    scopes = (0.3, "all"), (0.15, "vision")
    for i, name in enumerate(policies.registry):
        # The choice itself is tested under both scopes in tests/policies; here both in some, one in turn in the others.
        for keep, scope in scopes if name in BOTH_SCOPES else scopes[i % 2 :][:1]:
            try:
                policy = policies.make(name, keep=keep, scope=scope, **PREFILL_ONLY.get(name, {}))
            except vlkv.InputError as error:  # some have one scope only
                assert "scope" in str(error) or name in ("full", "kivi")
                continue
            if policy.reducer is None:  # what shortens the prompt is in test_reading.py
                yield policy


PLAN = list(plan())


@pytest.fixture(scope="module")
def params():
    return tiny_llava()


@pytest.fixture(scope="module")
def batch():
    return unequal_batch(padding="left")


@pytest.fixture(scope="module")
def read(params, batch):
    """The prompts, read once for all policies."""
    return jax.jit(vlkv.read_prompt)(params, batch)


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


@pytest.mark.default("CSP-")
@pytest.mark.parametrize("policy", PLAN, ids=lambda p: f"{type(p).__name__}-{p.scope}")
def test_decoding_from_the_cache(params, batch, read, prompts, policy):
    cache, logits = fill_cache(read, policy, new_tokens=8, key=jax.random.key(1)), read.logits
    kept = [kept_entries(cache, batch, row) for row in range(3)]
    ours = [logits]
    step = jax.jit(vlkv.decode_step)
    for i in range(FORCED.shape[1]):
        cache, logits = step(params, cache, FORCED[:, i])
        ours.append(logits)
    ours = np.stack(ours, axis=1)
    for row in range(3):
        first, layers = prompts[row]
        theirs = np.concatenate(
            [first[None], reference.decode(params.decoder, layers, kept[row], FORCED[row], policy.softmax_n)]
        )
        np.testing.assert_allclose(ours[row], theirs, atol=1e-4)
        check_selection(policy, layers, batch, row, kept[row])


def check_selection(policy, layers, batch, row, kept) -> None:
    """The seam `select`, given the row's own queries and keys, keeps what the cache holds."""
    if policy.facts.needs_key:
        return  # it draws anew
    q, k, v = (np.stack([x.transpose(1, 0, 2) for x in y]).astype(np.float32) for y in zip(*layers, strict=True))
    count, length = q.shape[2], batch.valid.shape[1]
    q, k, v = (np.pad(x, [(0, 0), (0, 0), (0, length - count), (0, 0)], constant_values=9) for x in (q, k, v))
    is_vision = np.pad(np.asarray(batch.is_vision)[row, batch.valid[row]], (0, length - count))
    selection = select(policy, q, k, v, is_vision, np.arange(length) < count)  # padded on the right, where it was left
    np.testing.assert_array_equal(selection.kept[..., :count], kept)
    assert not selection.kept[..., count:].any()


@pytest.mark.full
@pytest.mark.parametrize(
    "policy",
    [policies.ElasticCache(keep=0.3), policies.LookM(keep=0.3), policies.LookM(keep=0.15, scope="vision")],
    ids=lambda p: f"{type(p).__name__}-{p.scope}",
)
def test_merged_entries_lie_in_the_pool(batch, read, policy):
    cache = fill_cache(read, policy, new_tokens=8)
    start, length = np.asarray(cache.start), np.asarray(cache.counts)
    for row in range(3):
        q, k, v = (jnp.stack([getattr(x, name)[row].swapaxes(0, 1) for x in read.layers]) for name in "qkv")
        merged = compress(policy, q, k, v, batch.is_vision[row], batch.valid[row])[:2]
        for pool, expected, before in zip((cache.k, cache.v), merged, (k, v), strict=True):
            changed = False
            for layer, head in np.ndindex(start.shape[0], start.shape[2]):
                slots = start[layer, row, head] + np.arange(length[layer, row, head])
                tokens = cache.token[row, head, slots]
                held = np.asarray(pool)[row, head, slots]
                np.testing.assert_allclose(held, expected[layer, head, tokens], atol=1e-6)
                changed |= (abs(held - before[layer, head, tokens]) > 1e-3).any()
            assert changed or not batch.is_vision[row].any()


@pytest.mark.default("SnapKV")
@pytest.mark.parametrize(
    "policy", [policies.AirCache(keep=0.1), policies.SnapKV(keep=0.3)], ids=lambda p: type(p).__name__
)
def test_score_is_the_log_probability_of_the_reference(params, batch, read, prompts, policy):
    targets = FORCED.copy()
    targets[1, 4:] = -1  # a shorter continuation
    ours = np.asarray(jax.jit(vlkv.score)(params, batch, targets, policy))
    cache = fill_cache(read, policy, new_tokens=8)
    for row in range(3):
        first, layers = prompts[row]
        kept = kept_entries(cache, batch, row)
        logits = np.concatenate([first[None], reference.decode(params.decoder, layers, kept, FORCED[row, :-1])])
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        theirs = np.where(targets[row] >= 0, log_p[np.arange(7), targets[row]], 0.0)
        np.testing.assert_allclose(ours[row], theirs, atol=1e-4)


@pytest.mark.full
def test_past_the_tail_the_logits_are_nan_not_wrong(params, read):
    cache = fill_cache(read, policies.Full(), new_tokens=1)
    step = jax.jit(vlkv.decode_step)
    cache, logits = step(params, cache, FORCED[:, 0])
    assert np.isfinite(logits).all()
    _, logits = step(params, cache, FORCED[:, 1])
    assert np.isnan(logits).all()
