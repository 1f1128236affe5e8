"""Every registered method answers on the shipped miniature, in one program per method."""

import jax
import numpy as np
import pytest

import vlkv
from vlkv import policies
from vlkv.mini import CHECKPOINT, pages

NEW = vlkv.Greedy(max_new_tokens=6, stop=())


@pytest.fixture(scope="module")
def mini():
    params, processor = vlkv.load(CHECKPOINT)

    def batch(seed):
        """Three unequal rows: a page and a long question, two pages, no page."""
        a, b, c = (sample.image for sample in pages.held_out(3, seed))
        questions = ["what does row two say ?", pages.READ_PAGE, "read the page" if seed else "read"]
        return processor([[a], [b, c], []], questions)

    return params, batch(0), batch(1)


def options(name):
    """What a default does not fit: fractions that only deeper models leave room for."""
    return {"avl": {"core": 0.2, "prefill": 0.8, "text": 0.6}}.get(name, {})


@pytest.mark.parametrize("name", list(policies.registry))
def test_generate_in_one_trace(mini, name):
    params, *batches = mini
    full = issubclass(policies.registry[name], policies.Full)
    policy = policies.make(name, **({} if full else {"keep": 0.3}), **options(name))
    generate = jax.jit(vlkv.generate)
    before, outputs = generate._cache_size(), []
    for batch in batches:
        outputs.append(generate(params, batch, policy=policy, sampling=NEW, key=jax.random.key(0)))
        assert generate._cache_size() == before + 1, "another sample of the same shapes must not be traced again"
    assert batches[0].valid.sum(axis=1).tolist() != batches[1].valid.sum(axis=1).tolist()
    for batch, output in zip(batches, outputs, strict=True):
        assert (np.asarray(output.lengths) == 6).all()
        token, length = np.asarray(output.token), np.asarray(output.length)
        prompt = batch.valid.sum(axis=1)
        assert (length > 0).all()
        assert (length <= prompt[:, None]).all()
        assert ((token >= 0).sum(axis=1) == length.sum(axis=0)).all()
        for row in range(3):
            assert batch.valid[row, token[row][token[row] >= 0]].all(), "padding never gets a slot"
        if not full:
            assert length[:, :2].sum() < 6 * prompt[:2].sum() * length.shape[2]
