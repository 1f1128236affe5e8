"""A loop over layers computes what the layers compute one after the other."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.models import CONFIG, Drawn, same, tiny_llava, unequal_batch
from vlkv import policies
from vlkv.config import ExpertsConfig, LayerInputsConfig
from vlkv.decoder import Decoder
from vlkv.decoder.decoder import attend_to_prompt
from vlkv.decoder.loop import can_loop, loop
from vlkv.generation import reading, step


@pytest.fixture(scope="module")
def model():
    """A model of three layers; with fewer, there is no loop."""
    return tiny_llava()


EXPERTS = ExpertsConfig(layers=(1, 2), count=4, active=2, width=8, normalised=True)


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({"layer_scale": True, "qk_norm": True, "sandwich_norms": True}, (2, 2, 7, 32)),  # of the first two layers
        ({"experts": EXPERTS, "layer_inputs": LayerInputsConfig(vocab_size=9, width=4, pad=0)}, (2, 3, 7, 4)),
    ],
    ids=["equal layers", "unequal layers"],
)
def test_decoder(options, added):
    """With vectors that layers add or mix in, and the output of one token of each row."""
    decoder = Decoder(dataclasses.replace(CONFIG.decoder, **options), init=Drawn(1))
    rng = np.random.default_rng(2)
    x, added = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 7, 32), added))
    positions, valid, last = jnp.broadcast_to(jnp.arange(7)[None, :, None], (2, 7, 1)), jnp.ones((2, 7), bool), [6, 4]
    assert can_loop(decoder)

    def in_loop(decoder):
        attend = attend_to_prompt(decoder, valid)

        def attend_and_number(i, carry, q, k, v):
            return *attend(0, carry, q, k, v), i

        return loop(decoder, None, x, positions, attend_and_number, added=added, only=jnp.asarray(last))

    _, ours, numbers = jax.jit(in_loop)(decoder)
    theirs = jax.jit(lambda decoder: decoder(x, positions, valid, added))(decoder)
    np.testing.assert_allclose(ours[:, 0], theirs[np.arange(2), last], atol=1e-5)
    assert numbers.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "policy",
    [
        policies.PrefixKV(keep=0.4, cap=1.5),
        policies.compose(policies.CriticalKV(keep=0.4), merge=policies.LookM(keep=0.4)),
        policies.KVzip(keep=0.5, instruction=(7, 8)),
        policies.compose(policies.H2O(keep=0.4), reduce=policies.PruMerge(keep=0.6)),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_prefill_and_step(model, policy, monkeypatch):
    batch = unequal_batch(padding="left")

    def run(params, inputs):
        cache, logits = vlkv.prefill(params, inputs, policy, new_tokens=4)
        return cache, logits, *vlkv.decode_step(params, cache, jnp.argmax(logits, axis=-1))

    loops = []
    monkeypatch.setattr(reading, "loop", lambda *args, **options: loops.append(1) or loop(*args, **options))
    in_loop = jax.jit(partial(run))(model, batch)
    assert loops
    for module in (reading, step):
        monkeypatch.setattr(module, "can_loop", lambda decoder: False)
    same(in_loop, jax.jit(partial(run))(model, batch), atol=1e-5)
