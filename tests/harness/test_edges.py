"""Limits of answers that no other default test has; each finds a fault of `tests/mutants.json`."""

from types import SimpleNamespace

import numpy as np

import vlkv
from vlkv import policies
from vlkv.tools.harness import answering


def test_an_answer_has_the_positions_that_are_left_and_its_share_of_the_cache(monkeypatch, miniature):
    processor = vlkv.load_processor(miniature())
    asked = []

    def generate(params, inputs, *, policy, sampling, key):
        asked.append(sampling.max_new_tokens + int(inputs.valid.sum(axis=1).max()))
        return SimpleNamespace(tokens=np.zeros((2, 1), int), lengths=np.ones(2, int), cache_bytes=100)

    monkeypatch.setattr(answering, "generate", generate)
    model = answering.Answerer(params=None, processor=processor, policy=policies.Full(), batch_size=2)
    (answer,) = model.answers([answering.Question("read the page")], vlkv.Greedy(max_new_tokens=10**6))
    assert asked == [processor.config.decoder.max_positions] and answer.cache_bytes == 50
