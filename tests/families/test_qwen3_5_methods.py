"""Methods on Qwen3.5 against float64 numpy that knows its states."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.families import tiny
from tests.generation.test_decode import kept_entries
from tests.generation.test_prompt import by_last_row
from tests.generation.test_step import Simulation
from tests.policies import numpy_policies
from vlkv import analysis, policies
from vlkv.families import config_from_hf

NEW = 6
FORCED = np.random.default_rng(3).integers(3, 90, (3, NEW))
prefill = programs.prefill
step = programs.decode_step
CASES = {
    "snapkv": (policies.SnapKV(keep=0.4, window=4, scope="all"), numpy_policies.snapkv, dict(window=4)),
    "h2o": (policies.H2O(keep=0.4), numpy_policies.h2o, {}),
    "aircache": (policies.AirCache(keep=0.3), numpy_policies.aircache, {}),
}


@pytest.fixture(scope="module")
def params():
    return tiny.make_model("qwen3_5")


@pytest.fixture(scope="module")
def batch():
    return tiny.make_batch("qwen3_5")


@pytest.fixture(scope="module")
def embedded(params, batch):
    return np.asarray(jax.jit(lambda params, batch: params.embed(batch).x)(params, batch))


def full(decoder, x):
    """The layers with full attention."""
    return [one for one, kind in zip(x, decoder.kinds, strict=True) if kind.is_counted]


def of_all_layers(decoder, kept):
    """[L, K, T], with anything for layers that have no entries."""
    return np.stack([kept[kind.number if kind.is_counted else 0] for kind in decoder.kinds])


def forced(params, cache, logits, tokens=FORCED):
    """[B, 1 + NEW, vocab]"""
    found = [logits]
    for token in tokens.T:
        cache, logits = step(params, cache, token)
        found.append(logits)
    return np.stack(found, axis=1)


def simulated(case, decoder, layers, is_vision, *, evicts):
    """What a method keeps of the layers with full attention, and the function that evicts, for `reference.decode`."""
    policy, simulate, options = case
    seen = full(decoder, layers)
    q, k = (np.stack([np.swapaxes(one[i], 0, 1) for one in seen]) for i in (0, 1))
    prompt = numpy_policies.Prompt(q, k, is_vision, policy.scope, keep=policy.keep)
    kept, _, _ = simulate(prompt, **options)
    if not evicts:
        return kept, None
    simulation = Simulation(policy, seen, kept, prompt.sees)
    return kept, lambda layer, *rest: simulation(decoder.kinds[layer].number, *rest)


@pytest.mark.default("h2o")
@pytest.mark.parametrize("name", CASES)
def test_a_method_keeps_what_a_simulation_keeps(params, batch, embedded, name):
    """Prefill, what is kept, and steps in which entries are evicted; rows are padded on both sides."""
    policy = CASES[name][0]
    decoder = params.decoder
    cache, logits = prefill(params, batch, policy, new_tokens=NEW)
    ours = forced(params, cache, logits)
    for row in range(3):
        valid = batch.valid[row]
        is_vision, positions = batch.is_vision[row][valid], batch.positions[row][valid]
        first, layers = reference.prefill(decoder, embedded[row, valid], positions)
        kept, evict = simulated(CASES[name], decoder, layers, is_vision, evicts=cache.reuses)
        np.testing.assert_array_equal(kept_entries(cache, batch, row), kept)
        later = reference.decode(decoder, layers, of_all_layers(decoder, kept), FORCED[row],
                                 first=positions.max() + 1, evict=evict)  # fmt: skip
        np.testing.assert_allclose(ours[row], np.concatenate([first[None], later]), atol=2e-4)


@pytest.mark.full
def test_recurrent_layers_after_a_reduction_see_what_is_left(params, batch, embedded):
    """FastV drops tokens after the first full layer; the layer before it has put all of them into its state."""
    decoder, policy = params.decoder, policies.FastV(keep=0.5, layer=1)
    cache, logits = prefill(params, batch, policy, new_tokens=NEW)
    ours = forced(params, cache, logits)
    for row in range(3):
        valid = batch.valid[row]
        is_vision, positions = batch.is_vision[row][valid], batch.positions[row][valid]
        reduce = {1: by_last_row(is_vision, 0.5)} if is_vision.any() else None
        first, layers = reference.prefill(decoder, embedded[row, valid], positions, reduce)
        held = np.stack([np.isfinite(layer[1][:, :, 0]).T for layer in full(decoder, layers)])
        np.testing.assert_array_equal(kept_entries(cache, batch, row), held)
        assert held[0].all() and held[1].all() != is_vision.any()
        for state, one in zip(cache.states, [x for x in layers if len(x) == 2], strict=True):
            np.testing.assert_allclose(state.memory[row], one[0], atol=1e-4)
        later = reference.decode(decoder, layers, of_all_layers(decoder, held), FORCED[row], first=positions.max() + 1)
        np.testing.assert_allclose(ours[row], np.concatenate([first[None], later]), atol=2e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_a_second_question_on_a_compressed_cache(params, batch, embedded, name, tmp_path):
    """Questions of different lengths, on a cache from a file; H2O processes their tokens one by one."""
    policy = CASES[name][0]
    decoder, rng = params.decoder, np.random.default_rng(5)
    counts = (NEW, 3, 1)
    questions = [rng.integers(3, 90, n).tolist() for n in counts]
    ids = np.array([[0] * (NEW - len(x)) + x for x in questions])
    given = vlkv.Inputs.from_hf({"input_ids": ids, "attention_mask": (ids > 0).astype(int)}, params.config)
    cache, _ = prefill(params, batch, policy, new_tokens=2 * NEW)
    vlkv.save_cache(tmp_path / "cache.safetensors", params, cache)
    cache = vlkv.load_cache(tmp_path / "cache.safetensors", params)
    cache, logits = jax.jit(vlkv.extend, donate_argnames="cache")(params, cache, given)
    ours = forced(params, cache, logits)
    for row in range(3):
        valid = batch.valid[row]
        is_vision, positions = batch.is_vision[row][valid], batch.positions[row][valid]
        _, layers = reference.prefill(decoder, embedded[row, valid], positions)
        kept, evict = simulated(CASES[name], decoder, layers, is_vision, evicts=cache.reuses)
        tokens = [*questions[row], *FORCED[row]]
        wanted = reference.decode(decoder, layers, of_all_layers(decoder, kept), tokens, first=positions.max() + 1,
                                  evict=evict)  # fmt: skip
        np.testing.assert_allclose(ours[row], wanted[counts[row] - 1 :], atol=2e-4)


def test_bytes_of_a_cache_contain_its_states_which_no_method_and_no_prompt_changes(params, batch):
    def states(policy, batch):
        cache, _ = jax.eval_shape(lambda params, batch: vlkv.prefill(params, batch, policy), params, batch)
        own = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.states))
        without = sum(x.size * x.dtype.itemsize for x in cache.entry_arrays) - own
        return own, without

    (first, full_cache), (second, some) = (states(policy, batch) for policy in (policies.Full(), CASES["snapkv"][0]))
    assert first == second == 4 * 3 * 3 * (4 * 6 * 5 + 3 * (2 * 2 * 6 + 4 * 5)) and some < full_cache


@pytest.mark.full
def test_the_oracle_with_all_tokens_answers_as_the_full_cache(params, batch):
    prompt = programs.read_prompt(params, batch)
    everything = policies.ImgRandom(keep=1.0)
    oracle = analysis.oracle_cache(prompt, batch.is_vision, everything, new_tokens=NEW, key=jax.random.key(0))
    whole, _ = prefill(params, batch, policies.Full(), new_tokens=NEW)
    np.testing.assert_allclose(forced(params, oracle, prompt.logits), forced(params, whole, prompt.logits), atol=1e-5)


@pytest.mark.full
def test_a_repetition_leaves_no_trace_in_the_states(params, batch):
    """KVzip's second reading goes on from the state after the prompt, which alone is cached."""
    policy = policies.KVzip(keep=0.4, instruction=(3, 4, 5))
    cache, logits = prefill(params, batch, policy, new_tokens=NEW)
    plain, wanted = prefill(params, batch, policies.Full(), new_tokens=NEW)
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(cache.states), jax.tree.leaves(plain.states), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_layers_with_full_attention_are_every_fourth_by_default():
    raw = tiny.RAW["qwen3_5"]
    text = raw["text_config"] | {"layer_types": None, "num_hidden_layers": 9}
    decoder = config_from_hf(raw | {"model_type": "qwen3_5", "text_config": text}).decoder
    assert decoder.recurrent.layers == (0, 1, 2, 4, 5, 6, 8) and decoder.full_layers == 2
    assert [kind.number for kind in decoder.kinds] == [0, 1, 2, 0, 3, 4, 5, 1, 6]
