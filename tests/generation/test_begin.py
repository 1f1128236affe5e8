"""Policies with `answer=m`: the first tokens are those of the full cache and observe; then the prompt is compressed.

The reference is a decoder in float64 numpy that runs prompt and tokens at once, simulations of the methods on its
queries and keys, and decoding from the entries that they keep and those of the tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.families import tiny
from tests.models import CONFIG, SMALL, embed, tiny_llava, unequal_batch
from tests.policies import numpy_policies
from tests.policies.test_every_method import OPTIONS
from vlkv import policies
from vlkv.generation import jitted
from vlkv.generation.begin import Begun

NEW, ANSWER = 10, 5
KEY = jax.random.key(3)
# Policy, its function in numpy_policies, and options of this function.
CASES = {
    "snapkv": (policies.SnapKV(keep=0.3, window=8), numpy_policies.snapkv, dict(window=8)),
    "aircache": (policies.AirCache(keep=0.3), numpy_policies.aircache, {}),
    "h2o": (policies.H2O(keep=0.3, evict=False), numpy_policies.h2o, {}),
    "cake": (policies.CAKE(keep=0.3, window=8), numpy_policies.cake, dict(window=8)),
    "adakv": (policies.AdaKV(keep=0.3, window=8), numpy_policies.adakv, dict(window=8)),
}


def made(family):
    """A model, and a batch in which rows are padded on both sides."""
    if family == "small":
        return tiny_llava(config=SMALL), unequal_batch(padding=("right", "left", "right"))
    return tiny.make_model(family), tiny.make_batch(family)


def ends(is_vision):
    """The last token that each token attends to in models with `image_block`."""
    until = np.arange(len(is_vision))
    for t in until[::-1][1:]:
        until[t] = until[t + 1] if is_vision[t] and is_vision[t + 1] else t
    return until


def simulate(params, batch, row, begun, policy, method, options):
    """Logits of the next token after prompt and `begun`, layers of both, and what the method keeps of the prompt."""
    decoder, valid, begun = params.decoder, batch.valid[row], np.array(begun, int)
    count, ids = int(valid.sum()), np.concatenate([batch.tokens[row, valid], begun])
    x = decoder.embedding.scale * np.asarray(decoder.embedding.weight[...], np.float64)[begun]
    x = np.concatenate([np.asarray(embed(params, batch), np.float64)[row, valid], x])
    positions = batch.positions[row, valid]
    steps = positions.max() + 1 + np.arange(len(begun))
    positions = np.concatenate([positions, np.broadcast_to(steps[:, None], (len(begun), positions.shape[1]))])
    positions = positions[:, 0] if positions.shape[1] == 1 else positions
    is_vision = np.concatenate([batch.is_vision[row, valid], np.zeros(len(begun), bool)])
    until = ends(is_vision) if decoder.image_block else None
    added = reference.layer_inputs(decoder, ids, x, is_vision)
    logits, layers = reference.prefill(decoder, x, positions, added=added, until=until)
    counted = [layer for layer, kind in zip(layers, decoder.kinds, strict=True) if kind.is_counted]
    q, k = (np.stack([np.swapaxes(layer[i], 0, 1) for layer in counted]) for i in (0, 1))
    until = None if decoder.image_block_slides else until
    prompt = numpy_policies.Prompt(q, k, is_vision, policy.scope, until=until, keep=policy.keep)
    prompt.scope = prompt.scope & (np.arange(len(ids)) < count)  # the answer's tokens are no candidates
    prompt.most = int(prompt.scope.sum())
    prompt.total = numpy_policies.total_budget(prompt.layers, prompt.most, policy.keep) if prompt.most else 0
    kept, _, _ = method(prompt, **options) if prompt.most else (np.ones(k.shape[:3], bool), 0, 0)
    return logits, layers, kept, positions.max() + 1


@pytest.mark.default("small-snapkv")
@pytest.mark.ci("small-snapkv", "gemma4-aircache", "qwen2_vl-aircache")
@pytest.mark.parametrize(
    ("family", "name"),
    [*(("small", name) for name in CASES),
     ("gemma3", "snapkv"), ("gemma4", "aircache"), ("qwen3_5", "h2o"), ("qwen2_vl", "aircache")],
)  # fmt: skip
def test_tokens_and_kept_entries_are_those_of_float64(family, name):
    """One row ends before the cache is compressed. What the others keep differs from what they would keep before."""
    (params, batch), (policy, method, options) = made(family), CASES[name]
    waiting, first = policies.compose(policy, answer=ANSWER), []
    for _ in range(3):
        first.append(int(simulate(params, batch, 1, first, policy, method, options)[0].argmax()))
    stop, sampling = first[2], vlkv.Greedy(max_new_tokens=NEW, stop=(first[2],))
    output = tiny.generate(params, batch, policy=waiting, sampling=sampling)
    assert output.compressed_after == ANSWER and output.bytes_before > output.cache_bytes
    tokens, lengths, differs = np.asarray(output.tokens), np.asarray(output.lengths), []
    assert lengths[1] < ANSWER and (lengths > ANSWER + 1).any()
    for row, length in enumerate(lengths):
        assert length == NEW or (tokens[row, length - 1 :] == stop).all()
        begun, valid, count = tokens[row, : min(length, ANSWER)], batch.valid[row], batch.valid[row].sum()
        parts = [simulate(params, batch, row, begun[:n], policy, method, options) for n in range(len(begun) + 1)]
        _, layers, kept, first = parts[-1]
        np.testing.assert_array_equal(output.kept[:, row][..., valid], kept[..., :count])
        assert kept[..., count:].all() and not output.kept[:, row][..., ~valid].any()
        differs.append((kept[..., :count] != parts[0][2]).any())
        held = [kept[kind.number] if kind.is_counted else np.ones((len(layer[1][0]), kept.shape[2]), bool)
                for kind, layer in zip(params.decoder.kinds, layers, strict=True)]  # fmt: skip
        logits, rest = [part[0] for part in parts], tokens[row, len(begun) : length - 1]
        if len(rest):
            logits += [*reference.decode(params.decoder, layers, held, rest, first=first)]
        for token, each in zip(tokens[row, :length], logits, strict=False):
            assert each[token] >= each.max() - 1e-4
    assert any(differs)


def test_a_stream_begins_with_the_tokens_of_the_full_cache(params, batch, read, monkeypatch):
    """It ends with its last row, also if that is among these tokens."""
    cache = programs.fill_cache(read, policies.SnapKV(keep=0.3), new_tokens=8)
    policy = policies.compose(policies.SnapKV(keep=0.3), answer=3)
    for begun, wanted in (
        ([[7, 2, 2], [2, 2, 2], [7, 8, 2]], [[7, 2, 2], [2, 2, 2], [7, 8, 2]]),
        ([[2, 2, 2]] * 3, [[2]] * 3),
    ):
        given = Begun(cache=cache, logits=read.logits, tokens=jnp.array(begun))
        monkeypatch.setattr(jitted, "begin", lambda *args, given=given, **options: given)
        streamed = list(vlkv.stream(params, batch, policy=policy, sampling=vlkv.Greedy(max_new_tokens=6, stop=(2,))))
        np.testing.assert_array_equal(np.stack(streamed, axis=1), wanted)


def test_callers_that_cannot_wait_refuse(params, batch, read):
    """Nothing ignores the option, and nothing is compiled before the error."""
    policy = policies.compose(policies.SnapKV(keep=0.5), answer=4)
    q, k = np.zeros((2, 4, 6, 8)), np.zeros((2, 2, 6, 8))
    calls = [
        lambda: vlkv.prefill(params, batch, policy),
        lambda: vlkv.read_prompt(params, batch, policy),
        lambda: vlkv.fill_cache(read, policy, new_tokens=8),
        lambda: policies.select(policy, q, k, k, np.zeros(6, bool)),
        lambda: vlkv.analysis.kl_to_full(params, batch, policy),
    ]
    calls.append(lambda: vlkv.score(params, batch, np.zeros((3, 5), int), policy))
    for short in (vlkv.Greedy(max_new_tokens=1), vlkv.Greedy(max_new_tokens=5)):
        calls.append(partial(vlkv.generate, params, batch, policy=policy, sampling=short))
        calls.append(partial(next, vlkv.stream(params, batch, policy=policy, sampling=short)))
    for number, call in enumerate(calls):
        with pytest.raises(vlkv.InputError) as error:
            call()
        assert ("give at least 6" if number >= 5 else "leave out answer=") in str(error.value)
        assert len(str(error.value)) <= 200


@pytest.mark.full
def test_the_fact_says_which_scores_depend_on_queries():
    """Or budgets. Among methods that can wait: others reduce or repeat the prompt, or select again."""
    rng, vision = np.random.default_rng(0), np.arange(24) % 23 > 4
    k, v = rng.normal(size=(2, 2, 2, 24, 8)).astype(np.float32)
    q = rng.normal(size=(2, 2, 4, 24, 8)).astype(np.float32)
    positions, norms = jnp.broadcast_to(jnp.arange(24)[:, None], (2, 24, 1)), jnp.ones((2, 2, 24))
    context = policies.LayerContext(positions=positions, output_norm=norms, rope=CONFIG.decoder.rope)
    grid = np.full((24, 3), -1)
    grid[vision] = np.stack(np.unravel_index(np.arange(18), (2, 3, 3)), axis=1)

    @jax.jit
    def chosen(policy, q):
        selection = policies.select(policy, q, k, v, vision, key=KEY, grid=grid, context=context)
        return selection.budgets, selection.scores

    for name in policies.registry:
        policy = tiny.make_policy(name, **OPTIONS.get(name, {}))
        slots = policies.slots_of(policy)
        if slots.reduce is slots.repeats is None and not slots.every:
            first, second = (chosen(policy, one) for one in q)
            differs = [np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(first, second, strict=True)]
            assert any(differs) == policy.facts.observes, name
