"""What is special about SmolVLM and Idefics3; `test_every_family.py` has the rest."""

import numpy as np
import pytest

import vlkv
from tests.parity.conftest import torch, transformers


def test_positions_of_published_grids_are_those_of_transformers():
    """Line i of n patches has line i of the table; transformers looks it up by i / n in float32."""
    module = pytest.importorskip("transformers.models.idefics3.modeling_idefics3")
    grids = {config.vision.grid for name, config in vlkv.presets.items() if name.startswith(("smolvlm", "idefics3"))}
    assert grids == {26, 27, 32}
    for grid in grids:
        config = transformers.Idefics3VisionConfig(hidden_size=2, image_size=grid, patch_size=1)
        made = module.Idefics3VisionEmbeddings(config)
        with torch.no_grad():
            made.patch_embedding.weight[:], made.patch_embedding.bias[:] = 0, 0
            made.position_embedding.weight[:] = torch.arange(grid**2)[:, None]
            positions = made(torch.ones(1, 3, grid, grid), torch.ones(1, grid, grid, dtype=bool))[0, :, 0]
        np.testing.assert_array_equal(positions, np.arange(grid**2))
