"""Where an answer ends, against transformers; and what a model with windows in all layers refuses."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests import programs
from tests.families.common import NEW, answer, joined, save
from tests.families.common_text import llava_rows, text_rows
from tests.parity.conftest import make_text


def test_rows_end_at_their_stop_token_and_the_loop_ends_with_the_last(llava):
    """The stop ids are chosen from what transformers says, so that rows end at different steps."""
    model, folder = llava
    params, rows = vlkv.load_params(folder), llava_rows()
    inputs = vlkv.Inputs.from_hf(joined(rows), params.config)
    every = [answer(model, row, NEW)[2] for row in rows]
    sampling = vlkv.Greedy(max_new_tokens=NEW, stop=(int(every[0][3]), int(every[1][6])))
    output = programs.generate(params, inputs, sampling=sampling)
    for row, said in enumerate(every):
        ends = np.flatnonzero(np.isin(said, sampling.stop))
        length = int(ends[0]) + 1 if len(ends) else NEW
        assert int(output.lengths[row]) == length
        np.testing.assert_array_equal(output.tokens[row, :length], said[:length])
        assert (np.asarray(output.tokens[row, length:]) == said[length - 1]).all(), "its own stop id again"


def test_a_method_has_nothing_to_compress_if_all_layers_have_a_window(tmp_path):
    saved = save(make_text("mistral", sliding_window=8), tmp_path, text_rows())
    run = partial(vlkv.generate, policy=vlkv.policies.SnapKV(keep=0.5))
    with pytest.raises(vlkv.InputError, match="SnapKV: all layers of this model have a sliding window"):
        jax.eval_shape(run, saved.params, saved.inputs())


def test_bfloat16_stays_bfloat16(llava, tmp_path):
    convert(llava[1], tmp_path / "half", dtype="bfloat16", progress=False)
    for dtype in ("bfloat16", "float32"):
        params = vlkv.load_params(tmp_path / "half", dtype=None if dtype == "bfloat16" else dtype)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
