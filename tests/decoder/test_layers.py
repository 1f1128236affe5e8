"""Products of activations and weights."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vlkv
from tests.models import SMALL, tiny_llava, unequal_batch
from vlkv.compression.observe import LayerContext
from vlkv.compression.rotation import mean_rotation, rotated, unrotated
from vlkv.config import RopeConfig
from vlkv.decoder import memory_maps
from vlkv.decoder.layers import Initializer, JoinHeads, SplitHeads, product
from vlkv.decoder.rope import apply_rope, rope_table

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


@pytest.mark.parametrize(
    ("batch", "dtype"), [((), "float32"), ((1, 1), "bfloat16"), ((2, 3), "float32"), ((2, 40), "bfloat16")]
)
def test_products_equal_float64(batch, dtype):
    random = np.random.default_rng(0)
    for out, inner in [((5,), (24,)), ((3, 4), (24,)), ((5,), (4, 6))]:
        weight, x = (random.standard_normal(shape).astype(dtype) for shape in ((*out, *inner), (*batch, *inner)))
        axes = len(inner)
        expected = np.tensordot(
            np.float64(x), np.float64(weight), ([*range(-axes, 0)], [*range(len(out), len(out) + axes)])
        )
        made_of = jax.jit(
            lambda w, x, axes=axes: [product(w, x, axes=axes, dtype=made) for made in (None, jnp.float32)]
        )
        errors = ((None, 2**-8 if dtype == "bfloat16" else 1e-6), (jnp.float32, 1e-6))
        for result, (made, error) in zip(made_of(weight, x), errors, strict=True):
            assert result.dtype == (dtype if made is None else made)
            np.testing.assert_allclose(np.float64(result), expected, rtol=error, atol=error * 10)


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


@pytest.mark.parametrize("rope", KINDS, ids=["all channels", "a part", "a part, neighbours"])
def test_queries_before_rotation_and_at_the_next_position(rope):
    q = np.random.default_rng(0).standard_normal((3, 7, 16)).astype(np.float32)
    positions = jnp.arange(2, 9)[:, None]

    @jax.jit
    def turned(q, positions):
        table = rope_table(positions[None], 16, rope)
        return apply_rope(jnp.swapaxes(q, 0, 1)[None], table, neighbours=rope.neighbours)[0].swapaxes(0, 1)

    @jax.jit
    def back_and_one_ahead(q, rotated_q, positions):
        context = LayerContext(positions=positions, rope=rope)
        one_ahead = mean_rotation(context, jnp.ones(7, bool), 1, 16)
        return unrotated(rotated_q, context), rotated(q, one_ahead, context)

    back, ahead = back_and_one_ahead(q, turned(q, positions), positions)
    np.testing.assert_allclose(back, q, atol=1e-5)
    np.testing.assert_allclose(ahead, turned(q, np.full((7, 1), 9)), atol=1e-5)


@pytest.fixture(autouse=True)
def not_yet_warned():
    memory_maps._warn_once.cache_clear()


MANY = """
import warnings

import jax
import numpy as np

import vlkv
from tests import programs
from tests.models import SMALL, padded, tiny_llava
from vlkv import policies
from vlkv.decoder import memory_maps

params, forward = tiny_llava(config=SMALL), programs.forward
prompts = [vlkv.Inputs.from_hf(padded([[7] * 8] * rows), SMALL) for rows in range(1, 9)]
before = memory_maps.count()
expected = [forward(params, inputs) for inputs in prompts]
one = (memory_maps.count() - before) / len(prompts)  # the first program holds some more than the others
assert one > 10, "every shape has its own program"
jax.clear_caches()
memory_maps.most = lambda: int((before + 2.5 * one) / 0.75)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for inputs, logits in zip(prompts, expected, strict=True):
        np.testing.assert_array_equal(forward(params, inputs), logits)
        assert memory_maps.count() - before < 4.5 * one
    assert [(w.category, "are freed" in str(w.message)) for w in caught] == [(RuntimeWarning, True)], "said once"
    held = []
    for keep in (0.5, 0.6):
        sampling = vlkv.Greedy(max_new_tokens=2, stop=())
        vlkv.generate(params, prompts[2], policy=policies.StreamingLLM(keep=keep), sampling=sampling)
        held.append(memory_maps.count() - before)
    assert max(held) < 4.5 * one, "the second has freed the first, whose programs hold 3.7; XLA does so on a thread"
"""


@pytest.mark.full
@pytest.mark.skipif(memory_maps.count() == 0, reason="the operating system does not list memory maps")
def test_programs_are_freed_before_the_limit(root):
    """With a low limit, for our own programs and for those that a user compiles; the results do not change.

    In a process without the compiler flags of the tests, with which programs hold few maps.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", MANY]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_error_if_programs_cannot_be_freed(monkeypatch):
    monkeypatch.setattr(memory_maps, "count", lambda: 60_000)
    monkeypatch.setattr(memory_maps, "most", lambda: 65_530)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    message = r"holds 60000 of 65530 memory maps.*fewer methods"
    with pytest.warns(RuntimeWarning, match="freed"), pytest.raises(vlkv.InputError, match=message) as caught:
        jax.eval_shape(vlkv.forward, tiny_llava(config=SMALL), unequal_batch(SMALL))
    assert len(str(caught.value)) <= 200
