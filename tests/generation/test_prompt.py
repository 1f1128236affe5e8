"""Prompts that get shorter on their way through the layers, and policies made of several: against float64 numpy."""

import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.generation.test_decode import FORCED, kept_entries
from tests.models import SMALL, embed, tiny_llava
from tests.policies.numpy_policies import attention, best
from vlkv import policies
from vlkv.compression.sizes import cache_spec
from vlkv.policies import compose

LAYERS = 3


@pytest.fixture(scope="module")
def params():
    return tiny_llava()


prefill = programs.prefill
step = programs.decode_step
read_with = programs.read_prompt


def row_of(params, batch, row):
    """Embeddings of a row without its padding, and which of them are vision."""
    x = np.asarray(embed(params, batch))
    return x[row, batch.valid[row]], np.asarray(batch.is_vision)[row, batch.valid[row]]


def last_row(q, k):
    """Head-mean attention of the last token."""
    return attention(np.swapaxes(q, 0, 1), np.swapaxes(k, 0, 1))[:, -1].mean(axis=0)


def by_last_row(is_vision, fraction):
    """A reduction that keeps a fraction of the vision tokens by the last row of the layer before."""

    def reduce(x, q, k, places):
        vision = is_vision[places]
        count = max(1, int(np.floor(fraction * vision.sum() + 0.5)))
        return x, np.flatnonzero(~vision | best(last_row(q, k), vision, count))

    return reduce


def check(params, batch, policy, reduce, expected_kept=None):
    """Logits of prefill and of forced steps, and what the cache holds, for every row."""
    cache, logits = prefill(params, batch, policy, new_tokens=8)
    kept = [kept_entries(cache, batch, row) for row in range(3)]
    ours = [logits]
    for i in range(FORCED.shape[1]):
        cache, logits = step(params, cache, FORCED[:, i])
        ours.append(logits)
    ours = np.stack(ours, axis=1)
    for row in range(3):
        x, is_vision = row_of(params, batch, row)
        first, layers = reference.prefill(params.decoder, x, reduce=reduce(is_vision) if is_vision.any() else None)
        held = np.stack([np.isfinite(k[:, :, 0]).T for _, k, _ in layers])  # [L, K, T]
        held = held if expected_kept is None else expected_kept(held, layers, is_vision)
        np.testing.assert_array_equal(kept[row], held[[kind.is_counted for kind in params.decoder.kinds]])
        later = reference.decode(params.decoder, layers, held, FORCED[row], policies.slots_of(policy).softmax_n)
        np.testing.assert_allclose(ours[row], np.concatenate([first[None], later]), atol=1e-4)


@pytest.mark.full
def test_avl_drops_p_after_the_second_layer_from_all_caches_and_keeps_s_of_the_original_count(params, batch):
    policy = policies.AVL(keep=0.4, core=None, prefill=0.6)

    def expected(held, layers, is_vision):
        kept = np.zeros_like(held)
        count, left = is_vision.sum(), held[2, 0] & is_vision
        for layer, (q, k, _) in enumerate(layers):
            total = int(np.floor(0.4 * LAYERS * count + 0.5))
            budget = total // LAYERS + (layer < total % LAYERS)
            scores = np.full(len(is_vision), -1.0)
            there = held[layer, 0]
            scores[there] = last_row(q[there], k[there])
            kept[layer] = ~is_vision | (best(scores, left, budget) & left)
        return kept

    check(params, batch, policy, lambda is_vision: {2: by_last_row(is_vision, 0.6)}, expected)


def mass_by_place(cache, layer, row=0, head=0):
    """The decode state's values of each stored token."""
    state = cache.decode_states
    columns = (np.asarray(x)[layer, row, head] for x in (state.place, state.values["mass"], state.stored))
    return {int(place): mass for place, mass, stored in zip(*columns, strict=True) if stored}


def agree(one, other):
    """On the tokens that both store; how many these are."""
    common = sorted(one.keys() & other.keys())
    np.testing.assert_allclose([one[place] for place in common], [other[place] for place in common], rtol=1e-4)
    return len(common)


@pytest.mark.full
def test_memory_of_padded_rows_holds_the_prompts_numbers(params, batch):
    """A reduction moves tokens together; a step must find the scores of the tokens that it decides about."""
    plain = policies.H2O(keep=0.5)
    reduced = compose(plain, reduce=policies.FastV(keep=1.0, layer=1))
    caches = [prefill(params, batch, policy, new_tokens=1)[0] for policy in (plain, reduced)]
    for layer in range(LAYERS):
        assert agree(*(mass_by_place(cache, layer) for cache in caches)) > 10


@pytest.mark.full
def test_a_composed_policy_evicts_from_what_a_shortened_prompt_leaves(params, batch):
    """FastV, then the last row again: its share of every layer's own tokens, largest remainders to lower layers."""
    policy = compose(policies.AVL(keep=0.5, core=None), reduce=policies.FastV(keep=0.4, layer=1))

    def expected(held, layers, is_vision):
        kept = np.zeros_like(held)
        counts = (held[:, 0] & is_vision).sum(-1)
        total = int(np.floor(0.5 * counts.sum() + 0.5))
        share = total * counts / max(counts.sum(), 1)
        budget = np.floor(share + 1e-9).astype(int)
        for layer in np.argsort(-(share - budget), kind="stable")[: total - budget.sum()]:
            budget[layer] += 1
        for layer, (q, k, _) in enumerate(layers):
            there = held[layer, 0]
            scores = np.full(len(is_vision), -1.0)
            scores[there] = last_row(q[there], k[there])
            inside = there & is_vision
            kept[layer] = (there & ~is_vision) | (best(scores, inside, budget[layer]) & inside)
        return kept

    check(params, batch, policy, lambda is_vision: {1: by_last_row(is_vision, 0.4)}, expected)


def test_new_tokens_follow_what_is_left_of_the_prompt(batch):
    """LightKV's code numbers the survivors anew; the paper, and everything else here, counts every token ever seen."""
    policy = policies.LightKV(layers=(1,), windows=(1,), variant="released")
    prompt = read_with(tiny_llava(config=SMALL), batch, policy)
    left = np.asarray(prompt.layers[-1].valid).sum(axis=1)
    np.testing.assert_array_equal(prompt.next_position[:, 0], left)
    assert (left < batch.valid.sum(axis=1))[:2].all()


def test_the_pool_of_a_shortened_prompt_holds_what_is_left_and_little_more():
    policy = policies.FastV(keep=0.25)
    slots = cache_spec(policy, layers=28, vision=8192, text=64, new_tokens=0).allocated()
    left = 2 * 8192 + 26 * 2048 + 28 * 64
    assert left <= slots <= left + 28 * 15 + 16


class Hoarder(policies.FastV):
    """Keeps every token, and promises to keep few."""

    def reduce(self, tokens, obs, *, stage):
        return tokens, tokens.valid


@pytest.mark.full
def test_what_a_policy_keeps_beyond_its_promise_does_not_cut_off_the_question(params, batch):
    policy = Hoarder(keep=0.3, layer=1)
    promised = policy.remaining(stage=0, vision=batch.max_vision, images=2)
    with pytest.raises(vlkv.InputError, match=rf"Hoarder: reduce has kept 50 .* remaining allows {promised}"):
        vlkv.read_prompt(params, batch, policy)
    last = read_with(params, batch, policy).layers[-1]
    for row in range(3):
        kept = np.asarray(last.source)[row, np.asarray(last.valid)[row]]
        vision = np.flatnonzero(batch.is_vision[row])[:promised]
        assert kept.tolist() == sorted([*vision, *np.flatnonzero(batch.valid[row] & ~batch.is_vision[row])])


# --- made of parts --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def read(params, batch):
    return programs.read_prompt(params, batch)


fill_cache = programs.fill_cache


def test_a_reduction_beyond_the_model_or_of_another_prompt_is_refused_before_anything_runs(params, batch, read):
    with pytest.raises(vlkv.InputError, match=r"FastV reduces .* 3 layers: change layer"):
        vlkv.read_prompt(params, batch, policies.FastV(keep=0.5, layer=3))
    with pytest.raises(vlkv.InputError, match=r"LightKV .* change layers, windows"):
        vlkv.read_prompt(params, batch, policies.LightKV())
    with pytest.raises(vlkv.InputError, match="same policy"):
        vlkv.fill_cache(read, policies.FastV(keep=0.5), new_tokens=1)
