"""Rotations that are undone are those of the decoder, for every kind of pairs of channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlkv.compression.observe import LayerContext
from vlkv.compression.rotation import mean_rotation, rotated, unrotated
from vlkv.config import RopeConfig
from vlkv.decoder.rope import apply_rope, rope_table

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
