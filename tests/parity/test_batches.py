"""Tensors of torch in the states that people have them in, as inputs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import vlkv
from tests.models import CONFIG, IMAGE_TOKEN
from tests.parity.conftest import torch

IDS = torch.tensor([[1, *[IMAGE_TOKEN] * 25, 9, 8, 7]])
PIXELS = torch.randn(1, 3, 20, 20, generator=torch.Generator().manual_seed(0))
STATES = {
    "float32": (PIXELS, PIXELS),
    "bfloat16": (PIXELS.bfloat16(), PIXELS.bfloat16().float()),
    "float16": (PIXELS.half(), PIXELS.half().float()),
    "float64": (PIXELS.double(), PIXELS),
    "with a gradient": (PIXELS.clone().requires_grad_(True), PIXELS),
    "a list": ([PIXELS[0].bfloat16().requires_grad_(True)], PIXELS.bfloat16().float()),
    "a view": (PIXELS.permute(0, 1, 3, 2), PIXELS.permute(0, 1, 3, 2).contiguous()),
}


@pytest.mark.parametrize("state", STATES)
def test_tensors(state):
    given, wanted = STATES[state]
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "pixel_values": given}
    inputs = vlkv.Inputs.of(batch, CONFIG)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(inputs))
    np.testing.assert_array_equal(inputs.pixels[:1], wanted.numpy())
    np.testing.assert_array_equal(inputs.tokens[0, 26:29], [9, 8, 7])


def test_tensors_without_values_are_refused_in_a_line():
    with pytest.raises(vlkv.InputError, match="input_ids: this tensor has no values to read: Cannot copy out of meta"):
        vlkv.Inputs.of({"input_ids": IDS.to("meta")}, CONFIG)
    with pytest.raises(vlkv.InputError, match="pixel_values: this tensor has no values to read") as error:
        vlkv.Inputs.of({"input_ids": IDS, "pixel_values": PIXELS.to_sparse()}, CONFIG)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 200
    with pytest.raises(vlkv.InputError, match="input_ids must be whole numbers"):
        vlkv.Inputs.of({"input_ids": IDS.float()}, CONFIG)
