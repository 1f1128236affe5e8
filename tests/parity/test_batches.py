"""Tensors of torch in the states that people have them in, as inputs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import vlkv
from tests.models import CONFIG, IMAGE_TOKEN
from tests.parity.conftest import torch

STATES = {  # what is done with pixels, and with the same pixels of float32
    "float32": (lambda x: x, lambda x: x),
    "bfloat16": (lambda x: x.bfloat16(), lambda x: x.bfloat16().float()),
    "float16": (lambda x: x.half(), lambda x: x.half().float()),
    "float64": (lambda x: x.double(), lambda x: x),
    "with a gradient": (lambda x: x.clone().requires_grad_(True), lambda x: x),
    "a list": (lambda x: [x[0].bfloat16().requires_grad_(True)], lambda x: x.bfloat16().float()),
    "a view": (lambda x: x.permute(0, 1, 3, 2), lambda x: x.permute(0, 1, 3, 2).contiguous()),
}


def arrays():
    return torch.tensor([[1, *[IMAGE_TOKEN] * 25, 9, 8, 7]]), torch.randn(1, 3, 20, 20)


@pytest.mark.parametrize("state", STATES)
def test_tensors(state):
    (ids, pixels), (given, wanted) = arrays(), STATES[state]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": given(pixels)}
    inputs = vlkv.Inputs.of(batch, CONFIG)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(inputs))
    np.testing.assert_array_equal(inputs.pixels[:1], wanted(pixels).numpy())
    np.testing.assert_array_equal(inputs.tokens[0, 26:29], [9, 8, 7])


def test_tensors_without_values_are_refused_in_a_line():
    ids, pixels = arrays()
    with pytest.raises(vlkv.InputError, match="input_ids: this tensor has no values to read: Cannot copy out of meta"):
        vlkv.Inputs.of({"input_ids": ids.to("meta")}, CONFIG)
    with pytest.raises(vlkv.InputError, match="pixel_values: this tensor has no values to read") as error:
        vlkv.Inputs.of({"input_ids": ids, "pixel_values": pixels.to_sparse()}, CONFIG)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 200
    with pytest.raises(vlkv.InputError, match="input_ids must be whole numbers"):
        vlkv.Inputs.of({"input_ids": ids.float()}, CONFIG)
