"""Vectors of other shapes under the same names run through the same tests: fewer heads, fewer cases."""

import numpy as np
import pytest

from tests.policies import test_golden


def first_key_head(arrays):
    """What a file of one layer says of its first key head and the query heads that read it."""
    kv_heads, heads = len(arrays["k"]), len(arrays["q"])
    fewer = {kv_heads: 1, heads: heads // kv_heads}
    cut = {}
    for name, x in arrays.items():
        by_head = x.ndim > 1 and len(x) in fewer
        cut[name] = x[: fewer[len(x)]] if by_head else x
    return cut


def last_cases(arrays):
    """The last two numbers of sinks and ratios of the file for PrefixKV; every query head twice."""
    cut = dict(arrays, q=np.repeat(arrays["q"], 2, axis=1))
    cut["number_of_sink_tokens"] = arrays["number_of_sink_tokens"][-2:]
    for name in ("keep_ratios", "total_budget", "paper_budgets"):
        cut[name] = arrays[name][-2:]
    cut["paper_kept"] = arrays["paper_kept"][-2:, -2:]
    return cut


def last(first, second):
    """The last pair of indices into two lists."""
    return [(len(first) - 1, len(second) - 1)]


@pytest.mark.parametrize(
    ("test", "change"),
    [
        (test_golden.test_streaming_llm_keeps_what_the_released_code_keeps, first_key_head),
        (test_golden.test_h2o_keeps_what_the_released_codes_keep, first_key_head),
        (lambda golden: test_golden.test_prefixkv_budgets_and_kept_for_every_number_of_sinks(golden, last), last_cases),
    ],
    ids=["StreamingLLM", "H2O", "PrefixKV"],
)
def test_the_same_test_passes(golden, test, change):
    test(lambda name: change(golden(name)))
