"""What is special about Gemma 3 with images: they see both ways. `test_every_family.py` has the rest."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

import vlkv
from tests.families.common import Row, answer, joined
from tests.families.common_gemma import TOKENS, gemma3_rows
from vlkv import policies
from vlkv.errors import InputError


def test_the_direction_within_an_image_matters(saved):
    """Without its token types transformers uses causal attention, which gives other logits."""
    model, _, params, (row, *_) = saved("gemma3")
    causal = Row(row.ids, {"pixel_values": row.extra["pixel_values"]})
    both, one = (answer(model, x)[1] for x in (row, causal))
    assert np.abs(both - one).max() > 0.1
    assert params.decoder.image_block == TOKENS


def test_tokens_that_are_processed_one_by_one_cannot_contain_an_image(saved):
    """A method that evicts while decoding refuses an image in a later turn."""
    params = saved("gemma3").params
    first, second = (
        vlkv.Inputs.from_hf(joined([row]), params.config) for row in (gemma3_rows(1)[1], gemma3_rows(2)[0])
    )
    prefill = partial(vlkv.prefill, policy=policies.H2O(keep=0.5), new_tokens=60)
    cache, _ = jax.eval_shape(prefill, params, first)
    with pytest.raises(InputError, match="image tokens of this model attend to each other in both directions"):
        jax.eval_shape(vlkv.extend, params, cache, second)
