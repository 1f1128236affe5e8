"""`jax.jit(vlkv.generate)`: what traces and what does not, a user's own policy, sampling, streaming."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.generation.test_decode import kept_entries
from tests.models import CONFIG, IMAGE_TOKEN, SMALL, unequal_batch
from vlkv import policies

LAYERS = SMALL.decoder.layers
DRAWN = vlkv.Sample(max_new_tokens=4, temperature=1.5, top_k=20, top_p=0.9, stop=())
KEY = jax.random.key(7)
traces: list[str] = []


class Norms(policies.Policy):
    """Keeps the largest keys; counts how often it is traced. Defined outside the package."""

    power: float = 1.0

    def score(self, obs):
        traces.append(f"layer {obs.layer} keep {self.keep}")
        return jnp.linalg.norm(obs.k, axis=-1) ** self.power


def question(length: int, seed: int) -> vlkv.Inputs:
    rng = np.random.default_rng(seed)
    ids = [1, *[IMAGE_TOKEN] * 25, *rng.integers(6, 50, length)]
    pixels = rng.normal(size=(1, 3, 20, 20)).astype(np.float32)
    return vlkv.Inputs.from_hf({"input_ids": [ids], "pixel_values": pixels}, CONFIG)


def test_one_bucket_traces_once_and_a_stream_agrees(params, monkeypatch):
    given = dict(policy=Norms(keep=0.2), sampling=DRAWN, key=KEY)
    before = programs.generate._cache_size()
    traces.clear()
    first, other = (programs.generate(params, question(n, n), **given) for n in (18, 29))
    assert len(traces) == LAYERS, "two images and two questions of one bucket: one trace"
    assert programs.generate._cache_size() == before + 1
    assert first.kept.sum() != other.kept.sum()
    streamed = list(vlkv.stream(params, question(18, 18), **given))
    np.testing.assert_array_equal(np.stack(streamed, axis=1), first.tokens)
    broken = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), params)
    marked = programs.generate(broken, question(18, 18), **given)
    assert (marked.tokens == -1).all() and marked.lengths.tolist() == [1]
    monkeypatch.setattr(
        sys.modules["vlkv.generation.generate"], "explain", lambda *args: vlkv.InputError(f"NaN in {args[2]}")
    )
    with pytest.raises(vlkv.InputError, match=r"NaN in \[ True\]"):
        next(vlkv.stream(broken, question(18, 18), **given))


def test_policies_share_the_program_that_decodes(params):
    """Outside jit. The program writes into the memory of the cache."""
    whole = sys.modules["vlkv.generation.generate"]
    before, asked = whole._decode._cache_size(), question(18, 18)
    for policy in (policies.KeyDiff(keep=0.2), policies.Knorm(keep=0.2)):
        output = vlkv.generate(params, asked, policy=policy, sampling=DRAWN, key=KEY)
        expected = programs.generate(params, asked, policy=policy, sampling=DRAWN, key=KEY)
        np.testing.assert_array_equal(output.tokens, expected.tokens)
        np.testing.assert_array_equal(output.kept, expected.kept)
    assert whole._decode._cache_size() == before + 1
    cache, logits = programs.prefill(params, asked, policies.Knorm(keep=0.2), sampling=DRAWN)
    compiled = whole._decode.lower(params, cache, logits, DRAWN, KEY, None).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.bytes


class ByLayer(policies.Policy):
    """Keeps the largest keys, in the first layer the smallest; needs the number of the layer as an int."""

    def score(self, obs):
        norms = jnp.linalg.norm(obs.k, axis=-1)
        return -norms if obs.layer == 0 else norms


class ByLayerInALoop(ByLayer):
    """The same, with the number of the layer as an int or an array."""

    def score(self, obs):
        norms = jnp.linalg.norm(obs.k, axis=-1)
        return jnp.where(jnp.equal(obs.layer, 0), -norms, norms)


def test_a_policy_may_depend_on_the_layer_also_where_one_loop_processes_all(params, batch, read):
    caches = [programs.fill_cache(read, method(keep=0.25), new_tokens=4) for method in (ByLayer, ByLayerInALoop)]
    caches.append(programs.prefill(params, batch, ByLayer(keep=0.25), new_tokens=4)[0])
    for cache in caches:
        for row, count in enumerate(batch.valid.sum(axis=1)):
            kept = kept_entries(cache, batch, row)
            assert kept.sum(axis=-1).sum(axis=0).tolist() == [round(0.25 * LAYERS * count)] * 2
            for layer in range(LAYERS):
                keys = np.asarray(read.layers[layer].k)[row].swapaxes(0, 1)[batch.valid[row]]
                norms = np.linalg.norm(keys, axis=-1) * (-1 if layer == 0 else 1)
                best = kept[layer].sum(axis=-1, keepdims=True) > np.argsort(np.argsort(-norms, axis=0), axis=0).T
                np.testing.assert_array_equal(kept[layer], best)


def test_one_loop_makes_the_cache_of_a_shared_prompt(read):
    traces.clear()
    programs.fill_cache.trace(read, Norms(keep=0.4), new_tokens=4)
    assert len(traces) == 1 < LAYERS


def test_policies_and_sampling_are_pytrees_without_leaves():
    for value in (policies.AirCache(keep=0.1), policies.Full(), vlkv.Greedy(), vlkv.Sample(top_p=0.9)):
        assert jax.tree.leaves(value) == []
        assert dataclasses.replace(value) == value and hash(dataclasses.replace(value)) == hash(value)


def test_sampling_draws_from_the_cut_distribution():
    """Against numpy: temperature, then top-k, then the nucleus."""
    logits = jnp.log(jnp.array([0.4, 0.3, 0.15, 0.1, 0.05]))[None]
    cases = {
        vlkv.Sample(): [0.4, 0.3, 0.15, 0.1, 0.05],
        vlkv.Sample(top_k=2): [4 / 7, 3 / 7, 0, 0, 0],
        vlkv.Sample(top_p=0.7): [4 / 7, 3 / 7, 0, 0, 0],
        vlkv.Sample(top_p=0.71): [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0],
        vlkv.Sample(temperature=0.5, top_k=2): [16 / 25, 9 / 25, 0, 0, 0],
        vlkv.Sample(top_p=1e-6): [1, 0, 0, 0, 0],
    }
    draw = jax.jit(jax.vmap(lambda key: [sampling.choose(logits, key)[0] for sampling in cases]))
    for drawn, expected in zip(draw(jax.random.split(KEY, 4000)), cases.values(), strict=True):
        np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 4000, expected, atol=0.03)


def test_randomness_needs_a_key_before_anything_is_traced(params):
    with pytest.raises(vlkv.InputError, match=r"Random draws at random: pass key="):
        vlkv.generate(params, unequal_batch(), policy=policies.Random(keep=0.5))
    with pytest.raises(vlkv.InputError, match=r"sampling draws at random: pass key="):
        vlkv.generate(params, unequal_batch(), sampling=vlkv.Sample())


def test_an_answer_that_cannot_fit_is_refused(params):
    with pytest.raises(vlkv.InputError, match="limit"):
        vlkv.generate(params, unequal_batch(), sampling=vlkv.Greedy(max_new_tokens=500))


def test_a_prompt_on_the_device_is_refused_too_and_unknown_lengths_are_not(params):
    placed = jax.tree.map(jnp.asarray, unequal_batch(SMALL))
    longest = placed.lengths.max()
    with pytest.raises(
        vlkv.InputError, match=f"a prompt of {longest} tokens and 500 new ones exceed the model's limit"
    ):
        vlkv.generate(params, placed, sampling=vlkv.Greedy(max_new_tokens=500))
    assert placed.lengths.tolist() == unequal_batch(SMALL).valid.sum(axis=1).tolist()
    known = []
    jax.eval_shape(lambda inputs: known.append(inputs.lengths), placed)
    assert known == [None]


class PerToken(policies.Policy):
    """Its scores lack an axis."""

    def score(self, obs):
        return obs.k.sum(axis=(0, 2))


def test_a_policy_that_is_written_wrongly_is_named():
    q = np.ones((3, 2, 35, 8), np.float32)
    for policy in (PerToken(keep=0.5), policies.compose(PerToken(keep=0.5), store=policies.KIVI)):
        with pytest.raises(vlkv.InputError, match=r"PerToken: score returned shape \(35,\).*\[K, T\] = \(2, 35\)"):
            programs.select(policy, q, q, q, np.zeros(35, bool))


class Spendthrift(policies.Policy):
    """Hands out more than there is."""

    def score(self, obs):
        return jnp.ones(obs.k.shape[:2])

    def allocate(self, statistics, *, total, most, layers):
        return jnp.full(layers, most)


@pytest.mark.full
def test_an_allocation_that_overspends_loses_nothing_silently(params):
    """What the cache says it holds it does hold: the upper layers get less. `select` knows the values and refuses."""
    cache = vlkv.fill_cache(vlkv.read_prompt(params, question(9, 1)), Spendthrift(budget=20), new_tokens=1)
    lengths = np.asarray(cache.counts)[:, 0]
    assert lengths.tolist() == [[35, 35], [5, 5]]
    assert ((np.asarray(cache.token)[0] >= 0).sum(axis=1) == lengths.sum(axis=0)).all()
    q = np.ones((3, 2, 35, 8), np.float32)
    with pytest.raises(vlkv.InputError, match=r"Spendthrift: allocate returned \[35, 35, 35\] .* a sum of at most 60"):
        policies.select(Spendthrift(budget=20), q, q, q, np.zeros(35, bool))


@pytest.mark.full
def test_a_cache_can_be_donated(params, batch, read):
    """Also where a method acts while decoding; the prompt stays whole, so that another cache can be made of it."""
    step = jax.jit(vlkv.decode_step, donate_argnames="cache")
    for policy in (policies.Full(), policies.H2O(keep=0.3)):
        cache = vlkv.fill_cache(read, policy, new_tokens=2)
        jax.block_until_ready(step(params, cache, jnp.array([7, 8, 9])))
    assert not any(x.is_deleted() for x in jax.tree.leaves(read))


@pytest.mark.parametrize("new_tokens", [0, -1])
def test_a_tail_without_slots_is_refused(params, batch, read, new_tokens):
    cache = programs.fill_cache(read, policies.SnapKV(keep=0.3), new_tokens=8)
    for make in (
        lambda: vlkv.prefill(params, batch, policies.Full(), new_tokens=new_tokens),
        lambda: vlkv.fill_cache(read, policies.Full(), new_tokens=new_tokens),
        lambda: vlkv.cache.resizing.resize(cache, new_tokens),
    ):
        with pytest.raises(vlkv.InputError, match=rf"new_tokens={new_tokens} must be a whole number of at least 1"):
            make()


def test_a_vocabulary_smaller_than_top_k_is_drawn_from_as_a_whole():
    logits = jnp.array([[0.0, -1.0, 50.0]])
    drawn = jax.jit(vlkv.Sample(top_k=50).choose)(logits, jax.random.key(0))
    np.testing.assert_array_equal(drawn, [2])
