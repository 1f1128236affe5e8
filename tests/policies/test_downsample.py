"""Downsample by hand: means of blocks, the place of the first token, edges, tokens on no grid."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tests.policies.arrays import tokens_of
from tests.policies.test_vision_selection import reduce
from vlkv.policies import Downsample


def test_blocks_by_hand():
    """Text, 2 x 3 patches with a newline after each line, text, another image of 1 x 1, padding."""
    grid = [(-1, -1, -1), (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, -1, -1), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, -1, -1),
            (-1, -1, -1), (1, 0, 0), (-1, -1, -1)]  # fmt: skip
    x = jnp.arange(12.0)[:, None] * jnp.array([[1.0, 10.0]])
    tokens = tokens_of(x, grid, valid=np.arange(12) < 11)
    made, kept = reduce(Downsample(), tokens, None)
    assert np.flatnonzero(kept).tolist() == [0, 1, 3, 4, 8, 9, 10]
    values = dict(zip(np.flatnonzero(kept).tolist(), np.asarray(made.x)[np.asarray(kept), 0].tolist(), strict=True))
    assert values == {0: 0, 1: (1 + 2 + 5 + 6) / 4, 3: (3 + 7) / 2, 4: 4, 8: 8, 9: 9, 10: 10}
    assert np.asarray(made.size)[[0, 1, 3, 4, 10]].tolist() == [1, 4, 2, 1, 1]
    assert np.asarray(made.grid)[[1, 3, 4]].tolist() == [[0, 0, 0], [0, 0, 1], [0, -1, -1]]
    np.testing.assert_array_equal(made.positions, tokens.positions)
    np.testing.assert_allclose(made.x[:, 1], 10 * made.x[:, 0])


def test_options():
    assert Downsample().keep == 0.25 and Downsample(side=3).keep == 1 / 9
    assert Downsample(most=144).remaining(stage=0, vision=576, images=1) == 144
