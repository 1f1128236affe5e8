"""Methods that evict while decoding, in a whole model: against float64 numpy that deletes entries, and their slots."""

import math

import jax
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.generation.test_decode import kept_entries
from tests.generation.test_extend import turn, words
from tests.models import embed
from tests.policies.numpy_policies import attention
from vlkv import policies
from vlkv.compression.sizes import cache_spec

TURN, STEPS = words(5, 8, 3, seed=9), 200
FORCED = np.random.default_rng(3).integers(6, 50, (3, STEPS))
fill_cache = programs.fill_cache
POLICIES = {
    "h2o": policies.H2O(keep=0.4),
    "roco": policies.RoCo(keep=0.4, recent=4),
    "prefixkv": policies.PrefixKV(keep=0.4, distance=9),
    "elastic": policies.ElasticCache(keep=0.4, distance=5, merging="none"),
}


class Simulation:
    """What leaves each key head, in the words of the papers: `reference.decode` calls it after every token."""

    def __init__(self, policy, layers, kept, sees=None):
        self.policy, self.capacity, self.prompt = policy, kept.sum(axis=-1), kept.shape[-1]
        sees = np.tri(self.prompt, dtype=bool) if sees is None else sees
        turned = [[np.swapaxes(x, 0, 1) for x in layer[:2]] for layer in layers]  # heads first
        rows, heads = np.stack([attention(q, k, sees=sees) for q, k in turned]), kept.shape[1]
        rows = rows.reshape(len(layers), heads, -1, self.prompt, self.prompt).mean(axis=2), rows**2
        squares = rows[1].reshape(len(layers), heads, -1, self.prompt, self.prompt).mean(axis=2)
        more = [(0, 0), (0, 0), (0, STEPS + 20)]
        self.total, self.square = (np.pad(x.sum(axis=2), more) for x in (rows[0], squares))
        self.rows = np.pad(np.broadcast_to(sees.sum(axis=0), self.total[..., : self.prompt].shape), more)

    def __call__(self, layer, head, places, shares):
        at = layer, head, places
        self.total[at] += shares.mean(axis=0)
        self.square[at] += (shares**2).mean(axis=0)
        self.rows[at] += 1
        return getattr(self, type(self.policy).__name__.lower())(at, self.capacity[layer, head], len(places))

    def h2o(self, at, capacity, count):
        """The least attended of those that are not among the most recent half."""
        return [least(self.total[at][: count - capacity // 2])] if count > capacity else []

    def streamingllm(self, at, capacity, count):
        """The oldest after the sinks."""
        return [self.policy.sinks] if count > capacity else []

    def roco(self, at, capacity, count):
        """Of the old ones the least attended on average, besides those whose attention varies most."""
        if count <= capacity:
            return []
        recent = min(self.policy.recent, capacity)
        mean = (self.total[at] / self.rows[at])[: count - recent]
        deviation = np.sqrt(np.maximum((self.square[at] / self.rows[at])[: count - recent] - mean**2, 0))
        spared = np.argsort(-deviation)[: int(self.policy.spread * (capacity - recent))]
        return [least(np.where(np.isin(np.arange(len(mean)), spared), np.inf, mean))]

    def prefixkv(self, at, capacity, count):
        """The one at a fixed distance from the newest, over the prompt's share of all tokens.

        The published codes count the distance from the end of the prompt's budget.
        """
        distance, asked = self.policy.distance, self.policy.budget if self.policy.variant == "released" else None
        end = asked or count
        over = count > math.ceil((asked or capacity) * (at[2][-1] + 1) / self.prompt)
        return [end - distance if end > distance else end // 2] if over else []

    elasticcache = prefixkv


def least(values):
    """Which is the least. Two that are nearly equal would be told apart by rounding: then take another seed."""
    first, second = np.sort(values)[:2] if len(values) > 1 else (values[0], np.inf)
    assert second == np.inf or second - first > 1e-6 * second
    return int(np.argmin(values))


def simulated(params, batch, policy, cache, row, tokens):
    """Logits [S, vocab] after each of a row's tokens."""
    x = np.asarray(embed(params, batch))[row, batch.valid[row]]
    layers = reference.prefill(params.decoder, x)[1]
    kept = kept_entries(cache, batch, row)
    evict = Simulation(policy, layers, kept) if cache.reuses else None
    return reference.decode(params.decoder, layers, kept, tokens, evict=evict)


def test_a_turn_evicts_as_a_simulation_that_deletes(params, batch, read):
    """Each row has its own number of tokens, and every key head deletes its own."""
    policy = POLICIES["h2o"]
    cache = fill_cache(read, policy, new_tokens=8)
    after, logits = programs.extend(params, cache, turn(TURN, seed=0))
    assert after.slots == cache.slots and after.tail_k is None
    for row, tokens in enumerate(TURN):
        expected = simulated(params, batch, policy, cache, row, tokens)
        np.testing.assert_allclose(logits[row], expected[-1], atol=1e-4)


@pytest.mark.full
@pytest.mark.ci("roco", "elastic")
@pytest.mark.parametrize("name", POLICIES)
def test_200_steps_after_a_turn_and_a_file(params, batch, read, tmp_path, name):
    """The pool grows when the file is loaded, if the method's budget follows the number of tokens seen."""
    policy, path = POLICIES[name], tmp_path / "cache.safetensors"
    first = fill_cache(read, policy, new_tokens=8)
    cache, logits = programs.extend(params, first, turn(TURN, seed=0))
    vlkv.save_cache(path, params, cache)
    cache = vlkv.load_cache(path, params, new_tokens=8 + STEPS)
    assert (cache.slots > first.slots) == (name in ("prefixkv", "elastic"))
    step, ours = jax.jit(vlkv.decode_step, donate_argnames="cache"), [logits]
    for tokens in FORCED.T:
        cache, logits = step(params, cache, tokens)
        ours.append(logits)
    ours = np.stack(ours, axis=1)
    for row, said in enumerate(TURN):
        expected = simulated(params, batch, policy, first, row, [*said, *FORCED[row]])
        np.testing.assert_allclose(ours[row], expected[len(said) - 1 :], atol=1e-4)


LAYERS, TILE = 28, 16
SHARE = [  # method, tokens of the prompt, new ones, and the entries that a fifth of what may be seen are
    *((method, 1024, new, 205) for method in (policies.H2O, policies.RoCo) for new in (64, 4096)),
    *((policies.PrefixKV, *sizes) for sizes in ((1024, 512, 308), (624, 256, 176))),
    *((policies.ElasticCache, *sizes) for sizes in ((1024, 512, 308), (624, 256, 176))),
]


@pytest.mark.parametrize(("method", "prompt", "new", "entries"), SHARE, ids=lambda x: getattr(x, "__name__", x))
def test_an_eviction_frees_a_slot(method, prompt, new, entries):
    """A layer and head have slots for the budget, for the token that arrives, and up to a tile."""
    slots = cache_spec(method(keep=0.2), layers=LAYERS, vision=0, text=prompt, new_tokens=new).allocated()
    assert LAYERS * (entries - 1) < slots <= LAYERS * (entries + 1 + TILE)


def test_the_text_window_of_avl_takes_slots_in_the_proportion_of_table_3():
    """Of a prompt of 640 tokens 50 % are stored, with T = 0.5 48 %, new tokens included."""
    whole, window = (
        cache_spec(policies.AVL(keep=0.45, text=text), layers=LAYERS, vision=576, text=64, new_tokens=32).allocated()
        / LAYERS
        for text in (None, 0.5)
    )
    assert 0.50 * 640 + 32 <= whole < 0.51 * 640 + 32 + TILE
    assert 0.475 * 640 <= window < 0.485 * 640 + 1 + TILE


def test_a_window_of_a_fixed_length_of_text_does_not_depend_on_new_tokens():
    policy = policies.AVL(keep=0.45, text=0.5, longest_text=96)
    few, many = (cache_spec(policy, layers=LAYERS, vision=576, text=64, new_tokens=new).allocated() for new in (8, 512))
    assert few == many
