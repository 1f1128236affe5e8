"""What is special about InternVL in transformers' form: tiles. `test_every_family.py` has the rest."""

import numpy as np

import vlkv
from tests.families.common import joined
from tests.families.common_internvl import SIDES, TOKENS


def test_the_grid_of_a_batch(saved):
    inputs = saved("internvl").inputs(SIDES)
    assert inputs.pixels.shape[0] == 6
    assert (inputs.max_images, inputs.max_vision) == (4, 64)
    assert inputs.is_vision.sum(axis=1).tolist() == [4 * TOKENS, TOKENS, 0]
    tiles = inputs.grid[0][inputs.is_vision[0]]
    wanted = [(tile, line, column) for tile in range(4) for line in range(4) for column in range(4)]
    np.testing.assert_array_equal(tiles, wanted)
    np.testing.assert_array_equal(inputs.vision_index[inputs.is_vision], np.arange(5 * TOKENS))


def test_an_inner_feature_layer_leaves_the_blocks_behind_it_out(saved):
    assert len(saved("internvl-6b").params.vision.blocks) == 2


def test_tiles_and_the_places_of_the_thumbnail_that_they_show(saved):
    """Three tiles side by side, of which the first shows the first two columns; the second picture is one tile."""
    _, _, params, rows = saved("internvl")
    batch = joined(rows, SIDES) | {"pixel_tiles": [[0, 0], [0, 0], [0, 0], [1, 3], [0, 0]]}
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    first, second = (inputs.tiles[row][inputs.is_vision[row]] for row in range(2))
    np.testing.assert_array_equal(first[:, 0], np.repeat(range(4), TOKENS))
    assert (first[: 3 * TOKENS, 1] == -1).all()
    np.testing.assert_array_equal(first[3 * TOKENS :, 1], [0, 0, 1, 2] * 4)
    np.testing.assert_array_equal(second, [[0, -1]] * TOKENS)
    assert (inputs.tiles[~inputs.is_vision] == -1).all()
