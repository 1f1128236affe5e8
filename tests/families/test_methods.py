"""Methods on decoders that are more than Llama's, against float64 numpy that knows them.

In Gemma 3 layers have windows, and images attend in both directions; in Gemma 4 these do so in layers with a window
only, layers use keys and values of earlier ones, and tokens have a vector for every layer. In Qwen3.5 layers have
states, and in Qwen3-VL features of the tower are added to the first layers.
"""

import functools
from typing import Any, NamedTuple

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
from vlkv import policies
from vlkv.families import config_from_hf

NEW = 6
# XLA without optimisations, as in tests, is off by up to 5e-4 for an image of Gemma 4; with them by 7e-6.
ATOL = {"gemma3": 1e-3, "gemma4": 1e-3, "qwen3_5": 2e-4, "qwen3_vl": 2e-4}
FORCED = np.random.default_rng(3).integers(3, 90, (3, NEW))
# Policy, its function in numpy_policies, and whether image rows are among those whose attention it sums.
CASES = {
    "snapkv": (policies.SnapKV(keep=0.4, window=4, scope="all"), numpy_policies.snapkv, dict(window=4), False),
    "h2o": (policies.H2O(keep=0.4), numpy_policies.h2o, {}, True),
    "roco": (policies.RoCo(keep=0.4, recent=4), numpy_policies.roco, dict(recent=4), True),
    "aircache": (policies.AirCache(keep=0.3), numpy_policies.aircache, {}, False),
    "aircache of image rows": (policies.AirCache(keep=0.3, window="vision", rows=6), numpy_policies.aircache,
                               dict(window="vision", rows=6), True),
    "prefixkv": (policies.PrefixKV(keep=0.4, scope="all"), numpy_policies.prefixkv, {}, True),
}  # fmt: skip


class Prompt(NamedTuple):
    """A row without its padding: arguments of `reference.prefill`, and which tokens are vision."""

    x: np.ndarray
    positions: np.ndarray | None
    added: Any
    until: np.ndarray | None
    is_vision: np.ndarray
    first: int  # position of the first new token

    def read(self, decoder, reduce=None):
        return reference.prefill(decoder, self.x, self.positions, reduce, self.added, self.until)


class Family(NamedTuple):
    params: Any
    batch: vlkv.Inputs
    rows: list[Prompt]
    atol: float


@functools.cache
def of(name: str) -> Family:
    params, batch = tiny.make_model(name), tiny.make_batch(name)
    return Family(params, batch, [prompt_of(params, batch, row) for row in range(3)], ATOL[name])


embed = jax.jit(lambda params, batch: params.embed(batch))


def prompt_of(params, batch, row: int) -> Prompt:
    decoder, valid, embedded = params.decoder, np.asarray(batch.valid[row]), embed(params, batch)
    x, is_vision, positions = (np.asarray(each[row])[valid] for each in (embedded.x, batch.is_vision, batch.positions))
    added = () if embedded.added is None else np.asarray(embedded.added)[row][:, valid]
    if decoder.layer_inputs is not None:
        added = reference.layer_inputs(decoder, batch.tokens[row][valid], np.float64(x), is_vision)
    until = ends(is_vision) if decoder.image_block else None
    axes = positions if positions.shape[1] > 1 else None
    return Prompt(x, axes, added, until, is_vision, positions.max() + 1)


def ends(is_vision):
    """The last token that each token attends to: of an image, that of the image."""
    until = np.arange(len(is_vision))
    for t in until[::-1][1:]:
        until[t] = until[t + 1] if is_vision[t] and is_vision[t + 1] else t
    return until


def full(decoder, x):
    return [one for one, kind in zip(x, decoder.kinds, strict=True) if kind.is_counted]


def of_all_layers(decoder, kept, layers):
    """[K, T] of each layer; what a ring holds is for the reference to decide, and a state holds no entries."""
    return [
        kept[kind.number] if kind.is_counted else kept[0] if kind.recurrent else np.ones(layer[1].shape[1::-1], bool)
        for kind, layer in zip(decoder.kinds, layers, strict=True)
    ]


def forced(params, cache, logits, tokens=FORCED):
    """[B, 1 + NEW, vocab]"""
    found = [logits]
    for token in tokens.T:
        cache, logits = programs.decode_step(params, cache, token)
        found.append(logits)
    return np.stack(found, axis=1)


def simulated(case, decoder, prompt: Prompt, layers, *, evicts: bool):
    """What a method keeps of the layers that it counts, the function that evicts, and whether blocks matter to it."""
    policy, simulate, options, _ = case
    seen = full(decoder, layers)
    q, k = (np.stack([np.swapaxes(one[i], 0, 1) for one in seen]) for i in (0, 1))
    until = None if decoder.image_block_slides else prompt.until  # in the layers that are scored
    asked, causal = (
        numpy_policies.Prompt(q, k, prompt.is_vision, policy.scope, keep=policy.keep, until=end)
        for end in (until, None)
    )
    (kept, _, scores), (_, _, others) = (simulate(one, **options) for one in (asked, causal))
    simulation = Simulation(policy, seen, kept, asked.sees)

    def evict(layer, *rest):  # nothing leaves the layers with a window
        return simulation(decoder.kinds[layer].number, *rest) if decoder.kinds[layer].is_counted else []

    return kept, evict if evicts else None, np.abs(scores - others).max() > 1e-3


@pytest.mark.default("qwen3_5-h2o")
@pytest.mark.ci("gemma3-aircache]", "qwen3_5-h2o", "gemma4-h2o", "gemma3-roco", "gemma3-prefixkv", "gemma4-snapkv")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3_5"])
def test_a_method_keeps_what_a_simulation_keeps(name, case):
    """Prefill, what is kept, and steps if they evict entries; rows are padded on both sides."""
    params, batch, rows, atol = of(name)
    policy, decoder, differs = CASES[case][0], params.decoder, []
    cache, logits = programs.prefill(params, batch, policy, new_tokens=NEW)
    ours = forced(params, cache, logits) if cache.reuses else np.asarray(logits)[:, None]
    for row, prompt in enumerate(rows):
        first, layers = prompt.read(decoder)
        kept, evict, matters = simulated(CASES[case], decoder, prompt, layers, evicts=cache.reuses)
        np.testing.assert_array_equal(kept_entries(cache, batch, row), kept)
        differs.append(matters)
        entries = of_all_layers(decoder, kept, layers)
        wanted = [first]
        if cache.reuses:
            wanted += [*reference.decode(decoder, layers, entries, FORCED[row], first=prompt.first, evict=evict)]
        np.testing.assert_allclose(ours[row], wanted, atol=atol)
    sees = bool(decoder.image_block) and not decoder.image_block_slides
    assert differs == [CASES[case][3] and sees] * 2 + [False]


@pytest.mark.default("qwen3_vl")
@pytest.mark.parametrize("name", ATOL)
def test_what_a_reduction_leaves(name):
    """FastV drops tokens after the first full layer.

    Images still attend in both directions, windows count the dropped tokens, a state has read them, and tokens that are
    left get their features of the tower.
    """
    params, batch, rows, atol = of(name)
    decoder, policy = params.decoder, policies.FastV(keep=0.5, layer=1)
    cache, logits = programs.prefill(params, batch, policy, new_tokens=NEW)
    ours = np.asarray(logits)[:, None] if name == "qwen3_vl" else forced(params, cache, logits)
    for row, prompt in enumerate(rows):
        is_vision = prompt.is_vision
        first, layers = prompt.read(decoder, {1: by_last_row(is_vision, 0.5)} if is_vision.any() else None)
        held = [np.isfinite(layer[1][:, :, 0]).T for layer in full(decoder, layers)]
        np.testing.assert_array_equal(kept_entries(cache, batch, row), held)
        assert held[0].all() and held[1].all() != is_vision.any()
        states = [layer for layer, kind in zip(layers, decoder.kinds, strict=True) if kind.recurrent]
        for state, one in zip(cache.states if states else (), states, strict=True):
            np.testing.assert_allclose(state.memory[row], one[0], atol=1e-4)
        entries = [  # a layer with a window after the reduction has no entries of dropped tokens
            np.isfinite(layer[1][:, :, 0]).T if not kind.recurrent else held[0]
            for layer, kind in zip(layers, decoder.kinds, strict=True)
        ]
        wanted = [first]
        if ours.shape[1] > 1:
            wanted += [*reference.decode(decoder, layers, entries, FORCED[row], first=prompt.first)]
        np.testing.assert_allclose(ours[row], wanted, atol=atol)


# --- states -----------------------------------------------------------------------------------------------------------


def test_layers_with_full_attention_are_every_fourth_by_default():
    raw = tiny.RAW["qwen3_5"]
    text = raw["text_config"] | {"layer_types": None, "num_hidden_layers": 9}
    decoder = config_from_hf(raw | {"model_type": "qwen3_5", "text_config": text}).decoder
    assert decoder.recurrent.layers == (0, 1, 2, 4, 5, 6, 8) and decoder.full_layers == 2
    assert [kind.number for kind in decoder.kinds] == [0, 1, 2, 0, 3, 4, 5, 1, 6]
