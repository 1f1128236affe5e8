"""Every registered method answers on the shipped miniature, in one program per method."""

import pytest
from flax import nnx

import vlkv
from tests.families import tiny
from vlkv import policies
from vlkv.mini import CHECKPOINT, pages


@pytest.fixture(scope="module")
def mini():
    params, processor = vlkv.load(CHECKPOINT)
    params.decoder.layers = nnx.data(params.decoder.layers[:2])  # of six: nearly all the time is the compiler's

    def batch(seed):
        """Three unequal rows: a page and a long question, two pages, no page."""
        a, b, c = (sample.image for sample in pages.held_out(3, seed))
        questions = ["what does row two say ?", pages.READ_PAGE, "read the page" if seed else "read"]
        return processor([[a], [b, c], []], questions)

    return params, batch(0), batch(1)


@pytest.mark.full
@pytest.mark.parametrize("name", list(policies.registry))
def test_generate_in_one_trace(mini, name):
    params, *batches = mini
    policy = tiny.make_policy(name)
    before, outputs = tiny.generate._cache_size(), []
    for batch in batches:
        outputs.append(tiny.answer(params, batch, policy))
        assert tiny.generate._cache_size() == before + 1, "another sample of the same shapes must not be traced again"
    assert batches[0].valid.sum(axis=1).tolist() != batches[1].valid.sum(axis=1).tolist()
    for batch, output in zip(batches, outputs, strict=True):
        tiny.check_output(batch, output, policy)
