"""Prompts with several pictures that no other default test has; each finds a fault of `tests/mutants.json`."""

import numpy as np

from tests.models import SMALL
from vlkv.buckets import Buckets
from vlkv.processing.arranging import arrange_entries

IMAGE = 9


def test_views_of_a_picture_are_counted_before_the_next_picture():
    tiles = np.array([(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 0, 0)])  # source, view, line and column
    alone = np.array([(3, 0, 0, 0), (4, 0, 0, 1)])
    tokens = np.full((1, 5), IMAGE)
    fields, _ = arrange_entries(tokens, np.ones((1, 5), bool), {IMAGE: [tiles, alone]}, Buckets())
    assert fields["grid"][0, :, 0].tolist() == [0, 1, 2, 3, 3] and fields["max_images"] >= 4


def test_bounds_are_those_of_the_row_with_most_squares():
    each, size = SMALL.per_picture, SMALL.vision.image_size
    tokens = np.zeros((2, 2 * each + 1), int)
    tokens[0, : 2 * each] = tokens[1, :each] = SMALL.image_token
    pixels = np.zeros((3, 3, size, size), np.float32)
    made = SMALL.arrange({"pixel_values": pixels}, tokens, np.ones(tokens.shape, bool), Buckets())
    assert made.max_images >= 2 and made.max_vision == made.max_images * each
