"""Caches whose entries are selected again while decoding, against float64 numpy that deletes entries."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

import vlkv
from tests import models, programs, reference
from tests.generation.test_extend import turn, words
from tests.generation.test_windows import DECODER
from tests.mechanisms import IN_BITS
from tests.policies.numpy_policies import apportion, attention, smoothed
from vlkv import policies
from vlkv.policies import compose

STEPS, EVERY, BUDGET, FIRST, WINDOW = 200, 16, 20, 3, 4


def mass(q, k):
    """Attention of the newest rows to the entries of one key head, summed: q [G, W, H], k [T, H] -> [T]."""
    rows = np.zeros((len(q), len(k), q.shape[-1]))
    rows[:, -q.shape[1] :] = q
    return attention(rows, k[None])[:, -q.shape[1] :].sum(axis=1).mean(axis=0)


def snapkv(q, k, places, kernel=5, pooling="avg", first=0, window=WINDOW):
    """Scores of the entries of one key head; the window and the first tokens are kept."""
    before = (np.arange(len(k)) < len(k) - window) & (places >= first)
    scores = smoothed((mass(q[:, -window:], k) * before)[None], kernel, pooling)[0]
    return np.where(before, scores, np.inf)


def uniform(score, budget=BUDGET):
    """The `budget` best entries of each head of a layer."""

    def select(q, keys, places):
        heads = zip(np.split(q, len(keys)), keys, places, strict=True)
        return [np.sort(np.argsort(-score(*head), kind="stable")[:budget]) for head in heads]

    return select


def adakv(q, keys, places, safeguard=0.2, budget=BUDGET, first=FIRST, window=WINDOW):
    heads, always = zip(np.split(q, len(keys)), keys, places, strict=True), first + window
    scores = [snapkv(*head, kernel=7, pooling="max", first=first, window=window) for head in heads]
    order = sorted((-x, head, i) for head, one in enumerate(scores) for i, x in enumerate(one) if x < np.inf)
    rest = len(keys) * (budget - always)
    counts = np.bincount([head for _, head, _ in order[:rest]], minlength=len(keys))
    real = always + (1 - safeguard) * counts + safeguard * (budget - always)
    budgets = apportion(real, len(keys) * budget, max(map(len, keys)))
    return [np.sort(np.argsort(-x, kind="stable")[:n]) for x, n in zip(scores, budgets, strict=True)]


def rkv(q, k, places, window=WINDOW):
    """The authors' code, written again: each matrix is whole."""
    old, unit = len(k) - window, k / np.linalg.norm(k, axis=1, keepdims=True)
    logits = (q[:, -window:] @ k[:old].T / np.sqrt(k.shape[1])).max(axis=0)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    importance = smoothed((shares / shares.sum(axis=1, keepdims=True)).mean(axis=0)[None], 7, "max")[0]
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0)
    last = [max(np.flatnonzero(row > 0.5), default=0) for row in cosine]
    cosine[np.arange(len(k)), last] = 0
    redundancy = np.exp(cosine.mean(axis=0))
    redundancy /= redundancy.sum()
    return np.append(0.07 * importance - 0.93 * redundancy[:old], np.full(window, np.inf))


def triattention(q, k, places, theta=1e4):
    """With complex numbers; q are the queries of the newest tokens."""
    half, newest = k.shape[1] // 2, places[-1]
    omega = theta ** (-np.arange(half) / half)

    def unrotated(x, at):
        return (x[..., :half] + 1j * x[..., half:]) * np.exp(-1j * np.multiply.outer(at, omega))

    q, k = unrotated(q, newest - np.arange(q.shape[1])[::-1]), unrotated(k, places)
    centre, norm = q.mean(axis=1)[:, None], np.abs(q).mean(axis=1)[:, None]
    ahead = [np.exp(1j * np.multiply.outer(newest + 1 + 2**i - places, omega)) for i in range(7)]
    scores = ((centre * k.conj() * np.mean(ahead, axis=0)).real + (norm - np.abs(centre)) * np.abs(k)).sum(axis=-1)
    return ((scores - scores.mean(axis=1, keepdims=True)) / scores.std(axis=1, keepdims=True)).max(axis=0)


def simulated(params, batch, row, kept, tokens, select, times=range(0, STEPS, EVERY), budget=BUDGET):
    """Logits after each token, if `select` chooses again when so many tokens have come. The first time is 0."""

    def again(step, layer, queries, heads):
        if step not in times or sum(len(places) for places, *_ in heads) <= len(heads) * budget:
            return heads
        queries = queries[:, max(time for time in times if time < step) :]
        kept = select(queries, [keys for _, keys, _ in heads], [places for places, *_ in heads])
        return [tuple(x[i] for x in head) for i, head in zip(kept, heads, strict=True)]

    x = np.asarray(models.embed(params, batch))[row, batch.valid[row]]
    layers = reference.prefill(params.decoder, x)[1]
    return reference.decode(params.decoder, layers, kept[..., batch.valid[row]], tokens, again=again)


recompress = jax.jit(vlkv.recompress)


@pytest.fixture(scope="module")
def model():
    return models.tiny_llava(config=models.SMALL), models.unequal_batch(models.SMALL)


@pytest.fixture(scope="module")
def filled(model):
    """The prompts' caches, with unequal heads, and the logits after them."""
    return programs.prefill(*model, CASES["adakv"][0], new_tokens=8)


def cases(budget=BUDGET, window=WINDOW, every=EVERY, theta=1e4):
    """Policies, and the functions that choose as they do."""
    near = {"budget": budget, "window": window}
    tri = policies.TriAttention(budget=budget, interval=every, ahead=64, keep_prompt=False)
    return {
        "snapkv": (compose(policies.SnapKV(**near), every=every), uniform(partial(snapkv, window=window), budget)),
        "adakv": (compose(policies.AdaKV(**near), every=every, first=FIRST), partial(adakv, **near)),
        "rkv": (policies.RKV(**near, interval=every), uniform(partial(rkv, window=window), budget)),
        "triattention": (tri, uniform(partial(triattention, theta=theta), budget)),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_200_tokens_are_those_of_a_simulation(model, name):
    """Rows have two images and text, one image, and a text that is shorter than the budget."""
    (policy, select), (params, batch) = CASES[name], model
    sampling = vlkv.Greedy(max_new_tokens=STEPS, stop=())
    output = programs.generate(params, batch, policy=policy, sampling=sampling)
    for row, tokens in enumerate(np.asarray(output.tokens)):
        expected = simulated(params, batch, row, output.kept[:, row], tokens[:-1], select)
        assert_chosen(tokens[1:], expected)


def assert_chosen(tokens, logits):
    """The simulation reads our tokens, so that it goes on where two logits are nearly equal."""
    behind = logits.max(axis=1) - np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    assert (behind < 1e-4).all() and (behind == 0).mean() > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_200_tokens_of_a_published_model_are_those_of_a_simulation(name, root):
    """SmolLM2-135M after 1,001 tokens of prose, with 256 entries."""
    folders = pytest.importorskip("benchmarks.real", reason="needs the extra real").folders
    params, processor = vlkv.load(folders.written(), dtype="float32")
    ids = np.array([processor.tokenizer.encode((root / "docs/architecture.md").read_text())[:1001]])
    batch = vlkv.Inputs.from_hf({"input_ids": ids, "attention_mask": np.ones_like(ids)}, params.config)
    policy, select = cases(budget=256, window=32, every=64, theta=params.config.decoder.rope.theta)[name]
    sampling = vlkv.Greedy(max_new_tokens=STEPS, stop=())
    output = programs.generate(params, batch, policy=policy, sampling=sampling)
    tokens, times = np.asarray(output.tokens)[0], range(0, STEPS, 64)
    assert_chosen(tokens[1:], simulated(params, batch, 0, output.kept[:, 0], tokens[:-1], select, times, budget=256))


def test_windows_are_left_alone():
    """Layers with a window keep their newest entries, and the entries of the others are selected again."""
    policy, select = CASES["snapkv"]
    params, batch = models.random_model(dataclasses.replace(models.CONFIG, decoder=DECODER)), models.unequal_batch()
    output = programs.generate(params, batch, policy=policy, sampling=vlkv.Greedy(max_new_tokens=60, stop=()))
    for row, tokens in enumerate(np.asarray(output.tokens)):
        kept = np.ones((4, *output.kept.shape[2:]), bool)
        kept[[kind.window is None for kind in params.decoder.kinds]] = output.kept[:, row]
        expected = simulated(params, batch, row, kept, tokens[:-1], select)
        np.testing.assert_array_equal(tokens[1:], expected.argmax(axis=1))


def test_turns_of_unequal_lengths_select_when_one_does_not_fit(model, filled):
    """A turn, ten single tokens, and another turn, in rows that are always selected together."""
    select, (params, batch), (before, _) = CASES["adakv"][1], model, filled
    first, second, forced = words(12, 7, 9, seed=1), words(11, 8, 20, seed=2), words(10, 10, 10, seed=3)
    cache, logits = programs.extend(params, before, turn(first, seed=0))
    for tokens in np.array(forced).T:
        cache, _ = programs.decode_step(params, cache, tokens)
    cache, logits = programs.extend(params, cache, turn(second, seed=0))
    assert cache.bytes == before.bytes
    # The 13th token of row 0 does not fit after 4 single ones. The turn has two parts of at most 16 tokens.
    counts = [len(words) for words in first]
    for row, times in enumerate([(0, n + 4, n + 10, n + 26) for n in counts]):
        tokens = [*first[row], *forced[row], *second[row]]
        kept = np.zeros((2, 2, batch.valid.shape[1]), bool)
        for layer, head in np.ndindex(2, 2):
            kept[layer, head, list(stored(before, layer, row, head))] = True
        expected = simulated(params, batch, row, kept, tokens, select, times)
        np.testing.assert_allclose(logits[row], expected[-1], atol=1e-4)


def stored(cache, layer, row, head):
    """The numbers of the tokens that a head stores."""
    start, count = (int(x[layer, row, head]) for x in (cache.start, cache.extent))
    return set(np.asarray(cache.token)[row, head % cache.token.shape[1], start : start + count].tolist())


def test_random_attention_keeps_the_prompt_and_evicts_answers_at_random(model):
    """Two turns of 16 tokens: every head keeps the prompt, and draws its own tokens of the answer, by the key."""
    policy, (params, batch) = policies.RandomAttention(budget=40, interval=EVERY), model
    forced = np.random.default_rng(0).integers(6, 50, (2 * EVERY, 3))
    answers = []
    for seed in (0, 0, 1):
        cache, _ = programs.prefill(params, batch, policy, new_tokens=8, key=jax.random.key(seed))
        bytes_before, length = cache.bytes, batch.valid.shape[1]
        for tokens in forced:
            cache, _ = programs.decode_step(params, cache, tokens)
        cache = recompress(cache)
        assert cache.bytes == bytes_before and not cache.used.any()
        heads = [stored(cache, layer, 2, head) for layer in range(2) for head in range(2)]
        assert all(set(np.flatnonzero(batch.valid[2])) <= head and len(head) == 40 for head in heads)
        answers.append([sorted(number for number in head if number >= length) for head in heads])
    assert answers[0] == answers[1] != answers[2]
    assert len({tuple(head) for head in answers[0]}) == 4, "heads draw by themselves"


REFUSED = {
    "scope='vision'": (policies.SnapKV(keep=0.2, scope="vision"), 64),
    "H2O evicts": (policies.H2O(keep=0.2), 64),
    "Full keeps": (policies.Full(), 64),
    "repeats the prompt": (policies.KVzip(keep=0.2), 64),
    "every=32 or more": (policies.SnapKV(keep=0.2), 8),
}


@pytest.mark.parametrize(
    ("reason", "policy", "every"),
    [(reason, *case) for reason, case in REFUSED.items()] + [("unequal bits", p, 64) for p in IN_BITS.values()],
)
def test_what_cannot_be_selected_again_is_refused(model, reason, policy, every):
    with pytest.raises(vlkv.InputError, match=reason):
        vlkv.generate(*model, policy=compose(policy, every=every))


def test_a_cache_without_observers_is_refused(model):
    with pytest.raises(vlkv.InputError, match="every=n"):
        jax.eval_shape(lambda: vlkv.recompress(vlkv.prefill(*model, policies.SnapKV(keep=0.3), new_tokens=8)[0]))


def test_another_policy_selects_if_the_cache_has_what_it_observes(model, filled):
    """A smaller budget; `keep` is a share of the entries of the cache. The first tokens stay, also in unequal heads."""
    (params, batch), (cache, _) = model, filled
    for tokens in np.random.default_rng(0).integers(6, 50, (10, 3)):
        cache, _ = programs.decode_step(params, cache, tokens)
    smaller = compose(policies.AdaKV(budget=10, window=WINDOW), first=FIRST)
    for other, entries in ((smaller, [10, 10, 10]), (policies.AdaKV(keep=0.5, window=WINDOW), [15, 15, 11])):
        after = recompress(cache, other)
        np.testing.assert_array_equal(after.extent.sum(axis=2), [[2 * n for n in entries]] * 2)
    after, first = recompress(cache, smaller), np.argsort(~batch.valid, axis=1, kind="stable")[:, :FIRST]
    for layer, row, head in np.ndindex(2, 3, 2):
        assert set(first[row].tolist()) <= stored(after, layer, row, head)
    for other, reason in (
        (policies.SnapKV(keep=0.5, window=WINDOW), "another kind"),
        (policies.AdaKV(keep=0.5), "more"),
    ):
        with pytest.raises(vlkv.InputError, match=reason):
            recompress(cache, other)


@pytest.mark.full
def test_stream_and_score_select_as_generate_does(model):
    """`stream` selects between its programs, and `score` within the program of a step."""
    params, batch = model
    options = {"policy": policies.RandomAttention(budget=40, interval=EVERY), "key": jax.random.key(1)}
    sampling = vlkv.Greedy(max_new_tokens=40, stop=())
    expected = np.asarray(programs.generate(params, batch, sampling=sampling, **options).tokens)
    streamed = np.stack(list(vlkv.stream(params, batch, sampling=sampling, **options)), axis=1)
    np.testing.assert_array_equal(streamed, expected)
    best = programs.score(params, batch, expected, **options)
    other = programs.score(params, batch, np.where(np.arange(40) == 39, (expected + 1) % 50, expected), **options)
    np.testing.assert_allclose(best[:, :39], other[:, :39], atol=1e-5)
    assert (best[:, 39] > other[:, 39]).all()
