"""A score that no other default test has; it finds a fault of `tests/mutants.json`."""

from types import SimpleNamespace

import numpy as np

from vlkv import policies
from vlkv.tools.evaluation import running


def test_the_log_probability_of_a_reference_is_the_sum_over_its_tokens(monkeypatch):
    monkeypatch.setattr(running, "_log_probabilities", lambda params, cache, logits, targets: -np.float32(targets))
    targets, nothing = np.array([[1, 2, 3], [4, 5, 6]]), SimpleNamespace(params=None)
    found = running._Evaluator._score(nothing, targets, None, policies.Full(), None, None, None)
    np.testing.assert_array_equal(found, [-6, -15])
