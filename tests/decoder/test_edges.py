"""Cases of the decoder that no other default test has; each finds a fault of `tests/mutants.json`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoder.test_experts import WIDTH, make, one_by_one
from tests.models import SMALL, tiny_llava
from vlkv.config import RopeConfig
from vlkv.decoder.experts import apply_experts
from vlkv.decoder.rope import rope_table


def test_parts_of_the_experts_give_parts_of_the_sum():
    module = make(4, 2)
    x = np.random.default_rng(2).normal(size=(1, 7, WIDTH)).astype(np.float32)
    weights = (*(weight[...] for weight in (module.gate, module.up, module.down)), jnp.ones(4))
    run = jax.jit(partial(apply_experts, active=2, normalised=True))
    tokens = jnp.asarray(x), module.router(jnp.asarray(x))
    parts = [run(tokens, tuple(weight[first : first + 2] for weight in weights), first) for first in (0, 2)]
    assert all(np.abs(part).max() > 0.01 for part in parts)
    np.testing.assert_allclose((parts[0] + parts[1])[0], one_by_one(module, x[0]), atol=1e-5)


@pytest.mark.parametrize(("length", "divisor"), [(8, 1.0), (9, 4.0)])
def test_long_rope_counts_the_positions_of_the_whole_row(length, divisor):
    rope = RopeConfig(theta=100.0, divisors=(1.0, 1.0), long=(4.0, 4.0), original=8)
    table = jax.jit(partial(rope_table, head_dim=4, rope=rope))(jnp.arange(length)[None, :, None])
    angle = np.arange(length)[:, None] * np.array([1.0, 0.1]) / divisor
    np.testing.assert_allclose(table[0, :, 0], np.concatenate([np.cos(angle), np.sin(angle)], axis=-1), atol=1e-5)


def test_capped_logits():
    config = dataclasses.replace(SMALL, decoder=dataclasses.replace(SMALL.decoder, logit_cap=2.0))
    x = np.random.default_rng(0).normal(size=(1, SMALL.decoder.width)).astype(np.float32)
    capped, raw = (np.asarray(tiny_llava(config=c).decoder.logits(jnp.asarray(x))) for c in (config, SMALL))
    np.testing.assert_allclose(capped, 2 * np.tanh(raw / 2), atol=1e-5)
