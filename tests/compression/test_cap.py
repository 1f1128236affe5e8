"""`cap`: layers choose a short list at once, so that the full cache of all layers never exists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.generation.test_decode import kept_entries
from vlkv import policies
from vlkv.config import DecoderConfig, ModelConfig


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "scope"), [(policies.AirCache, "vision"), (policies.PrefixKV, "all"), (policies.VLCache, "all")]
)
def test_a_cap_that_nothing_reaches_changes_nothing(read, batch, method, scope):
    fill_cache = programs.fill_cache
    exact, capped = (fill_cache(read, method(keep=0.4, scope=scope, cap=cap), new_tokens=1) for cap in (None, 2.5))
    np.testing.assert_array_equal(exact.counts, capped.counts)
    for row in range(3):
        np.testing.assert_array_equal(kept_entries(exact, batch, row), kept_entries(capped, batch, row))


@pytest.mark.full
def test_a_layer_more_costs_the_compiled_prefill_its_short_list_only():
    """In layers of 16 keys of 64 and a row of 2048 the cache outweighs all else that a layer leaves behind."""
    length, heads, head_dim, shape = 2048, 16, 64, jax.ShapeDtypeStruct

    def bytes_of(policy, layers):
        decoder = DecoderConfig(
            vocab_size=32, width=32, mlp_width=32, layers=layers, heads=heads, kv_heads=heads, head_dim=head_dim,
            norm_eps=1e-6, max_positions=9000,
        )  # fmt: skip
        params = jax.eval_shape(lambda: vlkv.init(ModelConfig(family="llama", decoder=decoder), jax.random.key(0)))

        def leaves(params, row, valid):
            inputs = vlkv.Inputs(
                tokens=row, positions=row[..., None], valid=valid, vision_index=row, pixels=None,
                grid=jnp.stack([row - row, row // 64, row % 64], axis=-1),
                max_vision=length - 64, max_text=64, max_instruction=64, max_images=1,
            )  # fmt: skip
            return jax.tree.leaves(vlkv.prefill(params, inputs, policy, new_tokens=1))

        row, valid = shape((1, length), jnp.int32), shape((1, length), bool)
        return jax.jit(leaves).lower(params, row, valid).compile().memory_analysis().temp_size_in_bytes

    exact, capped = (
        (bytes_of(policy, layers=8) - bytes_of(policy, layers=4)) / 4
        for policy in (policies.AirCache(keep=0.05), policies.AirCache(keep=0.05, cap=2.0))
    )
    entry = 2 * heads * head_dim * 4
    assert exact > length * entry
    # 2 x 0.05 of the vision tokens, and all text; and what the choice itself remembers of a layer.
    assert capped < 1.2 * (0.1 * (length - 64) + 64) * entry
