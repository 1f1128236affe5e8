"""A decoder that mixes full attention and sliding windows: what policies count, and what the rings contain."""

import dataclasses

import pytest

from tests import programs
from tests.generation.test_prompt import by_last_row, check
from tests.models import CONFIG, random_model, unequal_batch
from vlkv import policies

WINDOW, NEW = 12, 10
SLIDES = (WINDOW, None, WINDOW, None)
DECODER = dataclasses.replace(CONFIG.decoder, layers=4, windows=SLIDES)
prefill = programs.prefill


@pytest.fixture(scope="module")
def params():
    return random_model(dataclasses.replace(CONFIG, decoder=DECODER))


@pytest.fixture(scope="module")
def batch():
    return unequal_batch(padding="left")


def full(x):
    """The layers with full attention."""
    return [one for one, window in zip(x, SLIDES, strict=True) if window is None]


def test_a_reduction_follows_a_full_layer_and_windows_count_dropped_tokens(params, batch):
    check(params, batch, policies.FastV(keep=0.3, layer=1), lambda is_vision: {1: by_last_row(is_vision, 0.3)})
