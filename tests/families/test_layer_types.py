"""`layer_types` of every kind of decoder that reads it: one short error, whatever the file has."""

from __future__ import annotations

import copy

import pytest

from tests.families import tiny
from vlkv.errors import InputError
from vlkv.families import config_from_hf

LAYERS = 60
READ = {"gemma4": "full_attention or sliding_attention", "qwen3_5": "linear_attention or full_attention",
        "llava_onevision": "full_attention or sliding_attention"}  # fmt: skip
BAD = {
    "another kind": (["full_attention"] * 59 + ["chunked_attention"], "'chunked_attention'"),
    "too few": (["full_attention"] * 59, "59 layers"),
    "none": ([], "0 layers"),
    "no texts": ([["full_attention"]] * LAYERS, r"\['full_attention'\]"),
    "one text": ("full_attention " * LAYERS, "'full_attention full_attention "),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("family", READ)
def test_a_bad_list_is_named_in_one_line(family, bad):
    raw, (types, said) = copy.deepcopy(tiny.RAW[family]), BAD[bad]
    raw["text_config"] |= {"num_hidden_layers": LAYERS, "layer_types": types}
    message = rf"layer_types must be a list of {LAYERS} layers, each {READ[family]}, not {said}"
    with pytest.raises(InputError, match=message) as error:
        config_from_hf({**raw, "model_type": family})
    assert len(str(error.value)) <= 200
