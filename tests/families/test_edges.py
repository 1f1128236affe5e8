"""Settings at the edge of what is allowed that no other default test has; faults of `tests/mutants.json` show them."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest

from tests.families import tiny
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.llava_next.original import _height_first
from vlkv.families.qwen3_vl.tower import corners


def changed(family, part, **fields):
    raw = copy.deepcopy(tiny.RAW[family])
    raw[part] |= fields
    return config_from_hf({**raw, "model_type": family})


def test_a_range_of_tiles_need_not_begin_with_a_square():
    assert _height_first("(1x2),...,(2x3)", 10) == [[20, 10], [30, 10], [20, 20], [30, 20]]


def test_the_first_block_may_have_full_attention():
    assert changed("qwen2_5_vl", "vision_config", fullatt_block_indexes=[0, 1]).vision.full == (0, 1)
    with pytest.raises(InputError, match="must be indices of blocks"):
        changed("qwen2_5_vl", "vision_config", fullatt_block_indexes=[-1])


def test_the_padding_token_has_a_row_of_the_table_of_layer_inputs():
    rows = tiny.RAW["gemma4"]["text_config"]["vocab_size_per_layer_input"]
    changed("gemma4", "text_config", pad_token_id=rows - 1)
    with pytest.raises(InputError, match=f"exceed pad_token_id={rows}"):
        changed("gemma4", "text_config", pad_token_id=rows)


def test_a_picture_of_one_line_has_the_first_positions_of_the_table():
    index, weight = corners(jnp.array([[[0, 0], [0, 1], [0, 2]]]), 3)
    np.testing.assert_array_equal(weight, [[[1, 0, 0, 0]] * 3])
    np.testing.assert_array_equal(index[0, :, 0], [0, 1, 2])


@pytest.mark.parametrize("used", [True, False])
def test_a_sliding_window_is_used_only_if_the_config_says_so(used):
    raw = dict(model_type="qwen2", hidden_size=16, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
               num_hidden_layers=3, vocab_size=32, sliding_window=8, max_window_layers=1,
               use_sliding_window=used)  # fmt: skip
    assert config_from_hf(raw).decoder.windows == ((None, 8, 8) if used else ())
