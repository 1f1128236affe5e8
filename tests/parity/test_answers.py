"""Answers, folders and tensors beside transformers and torch."""

from functools import partial

import jax
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests import programs
from tests.families.common import NEW, answer, joined, save
from tests.families.common_text import llava_rows, text_rows
from tests.models import CONFIG, IMAGE_TOKEN
from tests.parity.conftest import make_text, torch, transformers
from vlkv.mini import CHECKPOINT, pages


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


@pytest.fixture(scope="module")
def theirs():
    return transformers.LlavaForConditionalGeneration.from_pretrained(CHECKPOINT).eval()


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
