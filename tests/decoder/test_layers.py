"""A product over heads leaves its weight in the order it is stored in."""

import math
import re

import jax
import numpy as np
import pytest
from flax import nnx

from vlkv.decoder.layers import Initializer, JoinHeads, SplitHeads

WIDTH, HEADS, HEAD_DIM = 24, 4, 10


@pytest.mark.parametrize(("made", "shape", "axes"), [(SplitHeads, (WIDTH,), 1), (JoinHeads, (HEADS, HEAD_DIM), 2)])
def test_no_weight_is_copied_into_another_order(made, shape, axes):
    layer = made(WIDTH, HEADS, HEAD_DIM, bias=True, init=Initializer(jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (1, 1, *shape))
    graph, weights = nnx.split(layer)
    run = jax.jit(lambda weights, x: nnx.merge(graph, weights)(x))
    w = np.float64(layer.weight[...])
    np.testing.assert_allclose(run(weights, x), np.tensordot(np.float64(x), w, ([*range(2, x.ndim)],
                               [*range(w.ndim - axes, w.ndim)])), rtol=1e-5, atol=1e-5)  # fmt: skip
    text = run.lower(weights, x).compile().as_text()
    results = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", text)
    sizes = {(math.prod(map(int, dims.split(","))), op) for dims, op in results}
    assert {op for size, op in sizes if size == w.size} <= {"parameter", "bitcast"}
