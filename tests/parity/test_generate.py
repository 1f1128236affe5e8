"""Where an answer ends, against transformers."""

from __future__ import annotations

import numpy as np

import vlkv
from tests import programs
from tests.families.common import NEW, answer, joined
from tests.parity.test_forward import llava_rows


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
