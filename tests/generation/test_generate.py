"""`jax.jit(vlkv.generate)`: what traces and what does not, a user's own policy, sampling, streaming."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.models import CONFIG, IMAGE_TOKEN, SMALL, unequal_batch
from vlkv import policies

LAYERS = SMALL.decoder.layers
SHORT = vlkv.Greedy(max_new_tokens=4, stop=())
traces: list[str] = []


class Norms(policies.Policy):
    """Keeps the largest keys; counts how often it is traced. Defined outside the package."""

    power: float = 1.0

    def score(self, obs):
        traces.append(f"layer {obs.layer} keep {self.keep}")
        return jnp.linalg.norm(obs.k, axis=-1) ** self.power


@pytest.fixture(scope="module")
def read(params):
    return programs.read_prompt(params, question(9, 1))


def question(length: int, seed: int) -> vlkv.Inputs:
    rng = np.random.default_rng(seed)
    ids = [1, *[IMAGE_TOKEN] * 25, *rng.integers(6, 50, length)]
    pixels = rng.normal(size=(1, 3, 20, 20)).astype(np.float32)
    return vlkv.Inputs.from_hf({"input_ids": [ids], "pixel_values": pixels}, CONFIG)


def test_one_bucket_traces_once_and_a_new_keep_once_more(params):
    generate = programs.generate
    before = generate._cache_size()
    traces.clear()
    outputs = [generate(params, question(n, n), policy=Norms(keep=0.2), sampling=SHORT) for n in (18, 29)]
    assert len(traces) == LAYERS, "two images and two questions of one bucket: one trace"
    assert generate._cache_size() == before + 1
    assert outputs[0].kept.sum() != outputs[1].kept.sum()
    for length, keep, times in ((20, 0.2, 1), (20, 0.4, 2), (25, 0.4, 2), (40, 0.4, 3)):  # a longer bucket: a new shape
        generate.trace(params, question(length, 1), policy=Norms(keep=keep), sampling=SHORT)
        assert len(traces) == times * LAYERS, f"{length} tokens, keep={keep}"


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


@pytest.mark.parametrize("method", [ByLayer, ByLayerInALoop])
def test_a_policy_may_depend_on_the_layer_also_where_one_loop_processes_all(params, method):
    inputs, policy = question(9, 1), method(keep=0.4)
    cache, _ = programs.prefill(params, inputs, policy, sampling=SHORT)
    fill = programs.fill_cache
    shared = fill(programs.read_prompt(params, inputs), policy, new_tokens=SHORT.max_new_tokens)
    np.testing.assert_array_equal(shared.token, cache.token)
    np.testing.assert_array_equal(shared.start, cache.start)
    other, _ = programs.prefill(params, inputs, Norms(keep=0.4), sampling=SHORT)
    assert not np.array_equal(other.token, cache.token)


def test_one_loop_makes_the_cache_of_a_shared_prompt(params, read):
    traces.clear()
    programs.fill_cache.trace(read, Norms(keep=0.4), new_tokens=4)
    assert len(traces) == 1 < LAYERS


@pytest.mark.full
def test_a_users_policy_keeps_what_it_says(params):
    inputs = question(9, 1)
    prompt = vlkv.read_prompt(params, inputs)
    cache = vlkv.fill_cache(prompt, Norms(keep=0.25), new_tokens=4)
    lengths = np.asarray(cache.counts)[:, 0]
    assert lengths.sum(axis=0).tolist() == [round(0.25 * LAYERS * 35)] * 2
    for layer in range(LAYERS):
        for head in range(2):
            norms = np.linalg.norm(np.asarray(prompt.layers[layer].k)[0, :35, head], axis=-1)
            best = set(np.argsort(-norms, kind="stable")[: lengths[layer, head]])
            begin = int(cache.start[layer, 0, head])
            assert set(np.asarray(cache.token)[0, head, begin : begin + lengths[layer, head]].tolist()) == best


def test_policies_and_sampling_are_pytrees_without_leaves():
    for value in (policies.AirCache(keep=0.1), policies.Full(), vlkv.Greedy(), vlkv.Sample(top_p=0.9)):
        assert jax.tree.leaves(value) == []
        assert dataclasses.replace(value) == value and hash(dataclasses.replace(value)) == hash(value)


@pytest.mark.full
def test_positions_count_every_token_ever_seen(params):
    cache, _ = vlkv.prefill(params, unequal_batch(), policies.StreamingLLM(keep=0.1), new_tokens=2)
    assert cache.next_position[:, 0].tolist() == np.asarray(unequal_batch().valid).sum(axis=1).tolist()


def test_stream_and_generate_agree(params):
    inputs, policy = unequal_batch(), policies.SnapKV(keep=0.3)
    sampling = vlkv.Sample(max_new_tokens=5, temperature=1.5, top_k=20, top_p=0.9, stop=())
    key = jax.random.key(7)
    output = programs.generate(params, inputs, policy=policy, sampling=sampling, key=key)
    streamed = np.stack(list(vlkv.stream(params, inputs, policy=policy, sampling=sampling, key=key)), axis=1)
    np.testing.assert_array_equal(output.tokens, streamed)
    broken = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), params)
    marked = programs.generate(broken, inputs, policy=policy, sampling=sampling, key=key)
    assert (marked.tokens == -1).all() and marked.lengths.tolist() == [1] * 3
    with pytest.raises(vlkv.InputError, match="the logits are NaN"):
        next(vlkv.stream(broken, inputs, policy=policy, sampling=sampling, key=key))


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
    keys = jax.random.split(jax.random.key(0), 4000)
    for sampling, expected in cases.items():
        drawn = jax.jit(jax.vmap(lambda key, s=sampling: s.choose(logits, key)[0]))(keys)
        share = np.bincount(np.asarray(drawn), minlength=5) / len(keys)
        np.testing.assert_allclose(share, expected, atol=0.03)


def test_randomness_needs_a_key_before_anything_is_traced(params):
    with pytest.raises(vlkv.InputError, match=r"Random draws at random: pass key="):
        vlkv.generate(params, unequal_batch(), policy=policies.Random(keep=0.5))
    with pytest.raises(vlkv.InputError, match=r"sampling draws at random: pass key="):
        vlkv.generate(params, unequal_batch(), sampling=vlkv.Sample())


@pytest.mark.full
def test_two_keys_draw_two_caches(params):
    prompt = vlkv.read_prompt(params, unequal_batch())
    tokens = [
        np.asarray(vlkv.fill_cache(prompt, policies.Random(keep=0.3), new_tokens=1, key=jax.random.key(seed)).token)
        for seed in (0, 0, 1)
    ]
    assert np.array_equal(tokens[0], tokens[1]) and not np.array_equal(tokens[0], tokens[2])


@pytest.mark.full
def test_64_bits_are_refused(params):
    q = np.ones((3, 2, 35, 8), np.float32)
    cache, _ = vlkv.prefill(params, question(9, 1), policies.Full(), new_tokens=1)
    with jax.enable_x64(True):
        for run in (
            lambda: vlkv.generate(params, question(9, 1), policy=policies.H2O(keep=0.5)),
            lambda: programs.generate(params, question(9, 1), policy=policies.AirCache(keep=0.5)),
            lambda: policies.select(policies.PrefixKV(keep=0.5), q, q, q, np.zeros(35, bool)),
            lambda: vlkv.decode_step(params, cache, jnp.array([7], jnp.int32)),
        ):
            with pytest.raises(vlkv.InputError, match="switch jax_enable_x64 off"):
                run()


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
    for policy in (PerToken(keep=0.5), policies.compose(policies.H2O(keep=0.5), allocate=PerToken)):
        with pytest.raises(vlkv.InputError, match=r"PerToken: score returned shape \(35,\).*\[K, T\] = \(2, 35\)"):
            policies.select(policy, q, q, q, np.zeros(35, bool))


NO_POLICY = """
import jax, numpy as np, vlkv
from vlkv import policies
from tests.models import tiny_llava, unequal_batch

params, inputs, q = tiny_llava(), unequal_batch(), np.ones((3, 2, 35, 8), np.float32)
for given, said in ((policies.SnapKV, "policy=SnapKV is a class: "), ("snapkv", "policy='snapkv' is a name: ")):
    for run in (
        lambda: vlkv.generate(params, inputs, policy=given),
        lambda: next(vlkv.stream(params, inputs, policy=given)),
        lambda: vlkv.score(params, inputs, np.ones((3, 2), np.int32), given),
        lambda: vlkv.prefill(params, inputs, given, new_tokens=1),
        lambda: vlkv.read_prompt(params, inputs, given),
        lambda: policies.select(given, q, q, q, np.zeros(35, bool)),
        lambda: policies.compose(given, store=policies.KIVI),
        *([lambda: jax.jit(vlkv.generate)(params, inputs, policy=given)] if given is policies.SnapKV else []),
    ):
        try:
            run()
        except vlkv.InputError as error:
            assert str(error).startswith(said) and "keep=0.1)" in str(error) and "\\n" not in str(error), error
        else:
            raise AssertionError(given)
"""


def test_what_is_no_policy_is_refused(root):
    """In a process of its own: here beartype would be first to object."""
    done = subprocess.run([sys.executable, "-c", NO_POLICY], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


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
@pytest.mark.parametrize("fill", [vlkv.fill_cache, programs.fill_cache])
def test_a_cache_can_be_donated(params, fill):
    """Also where a method acts while decoding; the prompt stays whole, so that another cache can be made of it."""
    prompt = vlkv.read_prompt(params, question(9, 1))
    step = jax.jit(vlkv.decode_step, donate_argnames="cache")
    for policy in (policies.Full(), policies.H2O(keep=0.3)):
        cache = fill(prompt, policy, new_tokens=2)
        jax.block_until_ready(step(params, cache, jnp.array([7])))
    assert not any(x.is_deleted() for x in jax.tree.leaves(prompt))


@pytest.mark.parametrize("new_tokens", [0, -1])
def test_a_tail_without_slots_is_refused(params, read, new_tokens):
    cache = programs.fill_cache(read, policies.Full(), new_tokens=1)
    for make in (
        lambda: vlkv.prefill(params, question(9, 1), policies.Full(), new_tokens=new_tokens),
        lambda: vlkv.fill_cache(read, policies.Full(), new_tokens=new_tokens),
        lambda: vlkv.cache.resizing.resize(cache, new_tokens),
    ):
        with pytest.raises(vlkv.InputError, match=rf"new_tokens={new_tokens} must be a whole number of at least 1"):
            make()
