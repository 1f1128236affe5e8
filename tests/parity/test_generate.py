"""Greedy generation with the full cache against transformers: 32 identical tokens, row by row."""

from __future__ import annotations

import numpy as np
import pytest

import vlkv
from tests import programs
from tests.parity.conftest import IMAGE_TOKEN, make_text, torch
from tests.parity.test_forward import prompts
from vlkv import policies

IMAGES = slice(0, 2), slice(2, 3), slice(3, 3)  # of each row


def theirs(model, batch, row: int, images: slice) -> np.ndarray:
    mask = batch["attention_mask"][row].astype(bool)
    ids = batch["input_ids"][row][mask][None]
    extra = {"pixel_values": torch.tensor(batch["pixel_values"][images])} if images.stop > images.start else {}
    tokens = model.generate(
        input_ids=torch.tensor(ids), attention_mask=torch.ones(ids.shape, dtype=torch.long), **extra,
        max_new_tokens=32, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    return tokens[0, ids.shape[1] :].numpy()


@pytest.mark.full
@pytest.mark.parametrize("padding", ["left", "right"])
def test_greedy_tokens_of_a_batch(llava, padding):
    model, folder = llava
    batch = prompts(padding)
    params = vlkv.load_params(folder)
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    output = programs.generate(params, inputs, policy=policies.Full(), sampling=vlkv.Greedy(max_new_tokens=32, stop=()))
    assert output.lengths.tolist() == [32, 32, 32]
    for row, images in enumerate(IMAGES):
        np.testing.assert_array_equal(output.tokens[row], theirs(model, batch, row, images))


@pytest.mark.full
def test_greedy_tokens_of_a_text_model(tmp_path):
    model = make_text("qwen2")
    model.save_pretrained(tmp_path)
    batch = prompts("left")
    batch["input_ids"] = np.where(batch["input_ids"] == IMAGE_TOKEN, 7, batch["input_ids"])
    params = vlkv.load_params(tmp_path)
    text = {key: batch[key] for key in ("input_ids", "attention_mask")}
    inputs = vlkv.Inputs.from_hf(text, params.config)
    output = programs.generate(params, inputs, sampling=vlkv.Greedy(max_new_tokens=32, stop=()))
    for row in range(3):
        np.testing.assert_array_equal(output.tokens[row], theirs(model, batch, row, slice(0, 0)))


def test_rows_end_at_their_stop_token_and_the_loop_ends_with_the_last(llava):
    """The stop ids are chosen from what transformers says, so that rows end at different steps."""
    model, folder = llava
    params, batch = vlkv.load_params(folder), prompts("right")
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    every = [theirs(model, batch, row, images) for row, images in enumerate(IMAGES)]
    sampling = vlkv.Greedy(max_new_tokens=32, stop=(int(every[0][3]), int(every[1][6])))
    output = programs.generate(params, inputs, sampling=sampling)
    streamed = np.stack(list(vlkv.stream(params, inputs, sampling=sampling)), axis=1)
    for row, said in enumerate(every):
        ends = np.flatnonzero(np.isin(said, sampling.stop))
        length = int(ends[0]) + 1 if len(ends) else 32
        assert int(output.lengths[row]) == length
        np.testing.assert_array_equal(output.tokens[row, :length], said[:length])
        assert (np.asarray(output.tokens[row, length:]) == said[length - 1]).all(), "its own stop id again"
        np.testing.assert_array_equal(streamed[row, :length], said[:length])
