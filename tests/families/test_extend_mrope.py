"""Several turns where positions have three axes: against transformers, given one prompt that holds both turns."""

from __future__ import annotations

import numpy as np
import pytest

import vlkv
from tests import programs
from tests.families.common import Row, answer, extend, joined, prefill, save, whole
from tests.families.common_qwen import make, make_rows
from vlkv import policies

FIRST = ((4, ("image", 1, 4, 6), 3), (7,))
SECOND = ((2, ("image", 1, 6, 2), 5), (3,))


@pytest.mark.full
def test_positions_of_a_later_turn_go_on_after_an_image(tmp_path):
    model, _, params, _ = save(make("qwen2_vl"), tmp_path)
    turns = make_rows(FIRST), make_rows(SECOND, seed=1)
    first, second = (
        vlkv.Inputs.from_hf(joined(rows, side), params.config)
        for rows, side in zip(turns, ("left", "right"), strict=True)
    )
    cache, _ = prefill(params, first, policies.Full(), new_tokens=24)
    cache, logits = extend(params, cache, second)
    _, after = programs.decode_step(params, cache, np.array([7, 8]))
    for number, rows in enumerate(zip(*turns, strict=True)):
        theirs = answer(model, whole(*rows, Row([7 + number], {"mm_token_type_ids": [[0]]})))[1]
        np.testing.assert_allclose(logits[number], theirs[-2], atol=1e-4)
        np.testing.assert_allclose(after[number], theirs[-1], atol=1e-4)
        assert theirs.std() >= 1
