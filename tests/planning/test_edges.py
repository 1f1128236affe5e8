"""A plan without a compiler, which no other default test makes; it finds faults of `tests/mutants.json`."""

import pytest

from vlkv import policies, presets
from vlkv.tools.planning import planning

pytestmark = pytest.mark.usefixtures("shapes_for_arrays")


def test_a_gpu_reads_the_weights_and_the_cache_in_prefill_and_in_a_step():
    made = planning.plan("qwen2-0.5b", topology="a100:1", prompt=200, batch=4, policy=policies.Full(), compare=False)
    run, c = made.runs[0], presets["qwen2-0.5b"].decoder
    layer = 2 * c.width * (c.heads + c.kv_heads) * c.head_dim + 3 * c.width * c.mlp_width
    weights = 2 * (c.layers * layer + c.vocab_size * c.width)  # the embedding is the head too
    for estimate in (run.prefill.estimate, run.decode.estimate):
        assert estimate.bytes == pytest.approx(weights + run.pool + run.tail, rel=0.001)
    entries = made.job.question.inputs.tokens.shape[1] + 64  # new tokens
    attention = 4 * c.layers * c.heads * c.head_dim * entries
    assert run.decode.estimate.flops == pytest.approx(4 * (weights + attention), rel=0.001)
