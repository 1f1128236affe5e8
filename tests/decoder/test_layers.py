"""Products of activations and weights."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vlkv
from tests.models import SMALL, tiny_llava, unequal_batch
from vlkv.config import RopeConfig
from vlkv.decoder import memory_maps
from vlkv.decoder.layers import Initializer, JoinHeads, SplitHeads, product
from vlkv.decoder.rope import rope_table

WIDTH, HEADS, HEAD_DIM = 24, 4, 10


@pytest.mark.parametrize(("made", "shape", "axes"), [(SplitHeads, (WIDTH,), 1), (JoinHeads, (HEADS, HEAD_DIM), 2)])
def test_no_weight_is_copied_into_another_order(made, shape, axes):
    layer = made(WIDTH, HEADS, HEAD_DIM, bias=True, init=Initializer(jax.random.key(0)))
    x = np.random.default_rng(1).normal(size=(1, 1, *shape)).astype(np.float32)
    graph, weights = nnx.split(layer)
    run = jax.jit(lambda weights, x: nnx.merge(graph, weights)(x))
    w = np.float64(layer.weight[...])
    np.testing.assert_allclose(run(weights, x), np.tensordot(np.float64(x), w, ([*range(2, x.ndim)],
                               [*range(w.ndim - axes, w.ndim)])), rtol=1e-5, atol=1e-5)  # fmt: skip
    text = run.lower(weights, x).compile().as_text()
    results = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", text)
    sizes = {(math.prod(map(int, dims.split(","))), op) for dims, op in results}
    assert {op for size, op in sizes if size == w.size} <= {"parameter", "bitcast"}


@pytest.mark.parametrize(("batch", "inner"), [((2,), (32,)), ((4, 1), (4, 8)), ((2, 8), (32,))])
def test_weight_stays_the_first_operand_for_few_rows(batch, inner):
    """XLA would copy a weight that is the second operand each time the product is computed."""
    weight, x = np.ones((48, *inner), np.float32), np.ones((*batch, *inner), np.float32)
    text = jax.jit(lambda w, x: product(w, x, axes=len(inner))).lower(weight, x).compile().as_text()
    assert re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text) == [f"48,{math.prod(batch)}"]


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


KINDS = [RopeConfig(theta=1e4), RopeConfig(theta=1e4, channels=8), RopeConfig(theta=1e4, channels=8, neighbours=True)]


@pytest.fixture(autouse=True)
def not_yet_warned():
    memory_maps._warn_once.cache_clear()


def test_an_error_if_programs_cannot_be_freed(monkeypatch):
    monkeypatch.setattr(memory_maps, "count", lambda: 60_000)
    monkeypatch.setattr(memory_maps, "most", lambda: 65_530)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    message = r"holds 60000 of 65530 memory maps.*fewer methods"
    with pytest.warns(RuntimeWarning, match="freed"), pytest.raises(vlkv.InputError, match=message) as caught:
        jax.eval_shape(vlkv.forward, tiny_llava(config=SMALL), unequal_batch(SMALL))
    assert len(str(caught.value)) <= 200
