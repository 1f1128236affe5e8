"""Compiled programs are freed before the process has no memory maps left."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

import vlkv
from tests.models import SMALL, tiny_llava, unequal_batch
from vlkv.decoder import memory_maps


@pytest.fixture(autouse=True)
def not_yet_warned():
    memory_maps._warn_once.cache_clear()


MANY = """
import warnings

import jax
import numpy as np

import vlkv
from tests import programs
from tests.models import SMALL, padded, tiny_llava
from vlkv import policies
from vlkv.decoder import memory_maps

params, forward = tiny_llava(config=SMALL), programs.forward
prompts = [vlkv.Inputs.from_hf(padded([[7] * 8] * rows), SMALL) for rows in range(1, 9)]
before = memory_maps.count()
expected = [forward(params, inputs) for inputs in prompts]
one = (memory_maps.count() - before) / len(prompts)  # the first program holds some more than the others
assert one > 10, "every shape has its own program"
jax.clear_caches()
memory_maps.most = lambda: int((before + 2.5 * one) / 0.75)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for inputs, logits in zip(prompts, expected, strict=True):
        np.testing.assert_array_equal(forward(params, inputs), logits)
        assert memory_maps.count() - before < 4.5 * one
    assert [(w.category, "are freed" in str(w.message)) for w in caught] == [(RuntimeWarning, True)], "said once"
    held = []
    for keep in (0.5, 0.6):
        sampling = vlkv.Greedy(max_new_tokens=2, stop=())
        vlkv.generate(params, prompts[2], policy=policies.StreamingLLM(keep=keep), sampling=sampling)
        held.append(memory_maps.count() - before)
    assert held[0] > 2.5 * one and held[1] < 1.5 * held[0], "the second has freed the first"
"""


@pytest.mark.full
@pytest.mark.skipif(memory_maps.count() == 0, reason="the operating system does not list memory maps")
def test_programs_are_freed_before_the_limit(root):
    """With a low limit, for our own programs and for those that a user compiles; the results do not change.

    In a process without the compiler flags of the tests, with which programs hold few maps.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", MANY]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_error_if_programs_cannot_be_freed(monkeypatch):
    monkeypatch.setattr(memory_maps, "count", lambda: 60_000)
    monkeypatch.setattr(memory_maps, "most", lambda: 65_530)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    message = r"holds 60000 of 65530 memory maps.*fewer methods"
    with pytest.warns(RuntimeWarning, match="freed"), pytest.raises(vlkv.InputError, match=message) as caught:
        jax.eval_shape(vlkv.forward, tiny_llava(config=SMALL), unequal_batch(SMALL))
    assert len(str(caught.value)) <= 200
