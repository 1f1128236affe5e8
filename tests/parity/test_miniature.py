"""The shipped miniature, loaded by transformers itself, gives the same answers as ours."""

from __future__ import annotations

import numpy as np
import pytest

import vlkv
from tests import programs
from tests.parity.conftest import torch, transformers
from vlkv.mini import CHECKPOINT, pages


@pytest.fixture(scope="module")
def theirs():
    return transformers.LlavaForConditionalGeneration.from_pretrained(CHECKPOINT).eval()


@pytest.mark.full
def test_answers_of_transformers(theirs):
    params, processor = vlkv.load(CHECKPOINT)
    samples = list(pages.held_out(8, seed=3))
    inputs = processor([s.image for s in samples], [s.question for s in samples])
    output = programs.generate(params, inputs, sampling=vlkv.Greedy(max_new_tokens=32))
    ours = processor.decode(output.tokens)
    for row, answer in enumerate(ours):
        ids = inputs.tokens[row][inputs.valid[row]][None]
        tokens = theirs.generate(
            input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.ones(ids.shape, dtype=torch.long),
            pixel_values=torch.tensor(inputs.pixels[row : row + 1]), max_new_tokens=32, do_sample=False,
        )  # fmt: skip
        assert answer == processor.decode(tokens[0, ids.shape[1] :].numpy())


def test_the_processor_of_transformers_reads_the_folder_alike(theirs):
    """Ids and pixels; a path, because transformers treats open images in another way than files."""
    ours = vlkv.load_processor(CHECKPOINT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    sample = next(pages.held_out(1, seed=4))
    inputs = ours(sample.image, sample.question)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": sample.question}]}],
        add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    ids = tokenizer(text.replace("<image>", "<image> " * pages.GRID**2), add_special_tokens=True)["input_ids"]
    np.testing.assert_array_equal(inputs.tokens[0][inputs.valid[0]], ids)
