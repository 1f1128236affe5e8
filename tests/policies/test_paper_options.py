"""Options that the papers use, each against the paper's number or formula."""

import argparse

import numpy as np
import pytest

from tests.models import tiny_llava, unequal_batch
from tests.policies.arrays import tokens_of
from tests.policies.numpy_policies import attention
from vlkv import policies
from vlkv.analysis import profiles
from vlkv.errors import InputError
from vlkv.generation.prompt import read_prompt
from vlkv.policies.lightkv import LightKV, processed
from vlkv.tools.commands.options import add_policy_arguments, policy_from


@pytest.mark.full
def test_csp_calibrated_share():
    """The share of cross attention among all attention of the last four rows, mean over rows, layers and heads."""
    params, batch = tiny_llava(), unequal_batch()
    policy, found = policies.CSP(keep=0.5, window=4, heads="each"), []
    read = read_prompt(params, batch)
    for row in range(len(batch.valid)):
        inside, length = batch.valid[row], batch.valid[row].sum()
        vision = batch.is_vision[row][inside]
        for layer in read.layers:
            q, k = (np.asarray(x)[row][inside].swapaxes(0, 1) for x in (layer.q, layer.k))
            a = attention(q, k, n=1)[:, -4:].reshape(len(k), -1, 4, length)
            crossing = vision[-4:, None] != vision
            found += (np.where(crossing, a, 0).sum((1, 2, 3)) / a.sum((1, 2, 3))).tolist()
    assert abs(profiles.cross_share(params, [batch], policy) - np.mean(found)) < 1e-5


def test_avl_any_keep_on_the_command_line():
    parser = argparse.ArgumentParser()
    add_policy_arguments(parser)
    for keep in (0.05, 0.2, 1.0):
        policy = policy_from(parser.parse_args(["--policy", "avl", "--keep", str(keep)]), lambda: None)
        assert (policy.keep, policy.core) == (keep, 0.3)


def test_lightkv_equation_9_and_the_rates_of_table_8():
    assert abs(processed((10, 20, 30), 40, (0.5,) * 3) - 0.469) < 5e-4, "the example of Sec. 3.3"
    for depth in (28, 32, 40):
        for rate in (0.55, 0.4, 0.3, 0.2):
            policy = LightKV(rate=rate)
            policy.check_model(depth)
            assert abs(processed(policy.reductions(depth), depth, policy.ratios) - rate) < 0.011, (depth, rate)
    assert LightKV(rate=processed((15, 23, 31), 40, (0.5,) * 3)).reductions(40) == (15, 23, 31)
    with pytest.raises(InputError, match=r"rate=0\.1 must lie between 0\.125"):
        LightKV(rate=0.1)


@pytest.mark.full
def test_lightkv_later_stages_on_the_original_grid():
    """Of 4 x 4 patches the left half is left: two windows a side hold a quarter of the image each, or of a square."""
    places = np.array([[0, y, x] for y in range(4) for x in range(2)])
    tokens = tokens_of(np.zeros((9, 1)), np.concatenate([places, [[0, 3, 3]]]))
    original, *_ = LightKV(windows=(2, 2, 2), grid="original").windowed(tokens, 1)
    np.testing.assert_array_equal(original, [0, 0, 0, 0, 2, 2, 2, 2, 3])
    square, *_ = LightKV(windows=(2, 2, 2)).windowed(tokens, 1)  # 3 x 3
    np.testing.assert_array_equal(square, [0, 0, 1, 0, 0, 1, 2, 2, 3])
