"""Several turns where positions have three axes: against transformers, given one prompt that holds both turns."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import vlkv
from tests.families.common_qwen import BUCKETS, for_model, make, one_row, prompts, torch
from vlkv import policies

FIRST = ((4, ("image", 1, 4, 6), 3), (7,))
SECOND = ((2, ("image", 1, 6, 2), 5), (3,))


@pytest.mark.full
def test_positions_of_a_later_turn_go_on_after_an_image(tmp_path):
    model = make("qwen2_vl")
    model.save_pretrained(tmp_path)
    params = vlkv.load_params(tmp_path)
    batches = [prompts("left", FIRST), prompts("right", SECOND, seed=1)]
    first, second = (vlkv.Inputs.from_hf(batch, params.config, BUCKETS) for batch in batches)
    cache, _ = jax.jit(vlkv.prefill, static_argnames="new_tokens")(params, first, policies.Full(), new_tokens=24)
    cache, logits = jax.jit(vlkv.extend)(params, cache, second)
    _, after = jax.jit(vlkv.decode_step)(params, cache, np.array([7, 8]))
    for row in range(2):
        parts = [one_row(batch, row, rows) for batch, rows in zip(batches, (FIRST, SECOND), strict=True)]
        whole = {name: torch.cat([part[name] for part in parts], dim=int(array.ndim == 2 and len(array) == 1))
                 for name, array in parts[0].items() if name != "image_grid_thw"}  # fmt: skip
        if "image_grid_thw" in parts[0]:
            whole["image_grid_thw"] = torch.cat([part["image_grid_thw"] for part in parts])
        whole["input_ids"] = torch.cat([whole["input_ids"], torch.tensor([[7 + row]])], dim=1)
        whole["mm_token_type_ids"] = torch.cat([whole["mm_token_type_ids"], torch.tensor([[0]])], dim=1)
        with torch.no_grad():
            theirs = model(**for_model("qwen2_vl", whole)).logits[0].numpy()
        np.testing.assert_allclose(logits[row], theirs[-2], atol=1e-4)
        np.testing.assert_allclose(after[row], theirs[-1], atol=1e-4)
        assert theirs.std() >= 1
