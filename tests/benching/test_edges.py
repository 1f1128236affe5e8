"""What a benchmark refuses, which no other default test asks; it finds a fault of `tests/mutants.json`."""

import pytest

import vlkv
from vlkv import policies
from vlkv.tools.benching.settings import check_policy


def test_vision_tokens_of_a_text_model_cannot_be_compressed():
    config = vlkv.presets["qwen2-0.5b"]
    check_policy(policies.SnapKV(keep=0.5, scope="all"), config)
    with pytest.raises(vlkv.InputError, match="use --scope all"):
        check_policy(policies.SnapKV(keep=0.5, scope="vision"), config)
