"""A quantised pool against KIVI's definition in float64 numpy; attention over it against attention over an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention, dequantize, quantize, ragged

AXES = ["slots", "channels"]
run = jax.jit(quantize, static_argnames=("bits", "group", "axis"))
values_of = jax.jit(dequantize)


def blocks_of(entries):
    """Blocks of so many entries, three at a time."""
    return lambda bound, entry, segments: (min(entries, bound), 3)


def kivi(x, used, bits, group, axis):
    """Min, step and value of every number, from the definition: x [B,K,P,H], used [B,K,P]."""
    along = 2 if axis == "slots" else 3
    used = np.broadcast_to(np.asarray(used)[..., None], x.shape)
    x, used = (np.moveaxis(y, along, -1) for y in (np.float64(x), used))
    low, step, value = np.zeros(x.shape), np.zeros(x.shape), np.zeros(x.shape)
    for line in np.ndindex(x.shape[:-1]):
        for first in range(0, x.shape[-1], group):
            part = (*line, slice(first, first + group))
            inside = x[part][used[part]]
            if inside.size:
                low[part], step[part] = inside.min(), (inside.max() - inside.min()) / (2**bits - 1)
            safe = np.where(step[part] > 0, step[part], 1)
            value[part] = low[part] + np.clip(np.round((x[part] - low[part]) / safe), 0, 2**bits - 1) * step[part]
    return tuple(np.moveaxis(y, -1, along) for y in (low, step, value))


def random_pool(seed, shape, dtype=jnp.float32):
    """Channels of very different sizes and means, as keys have; a third of the slots free and holding huge values."""
    random = np.random.default_rng(seed)
    channels = shape[1], 1, shape[3]
    x = random.standard_normal(shape) * random.uniform(0.1, 5, channels) + 10 * random.standard_normal(channels)
    used = random.random(shape[:3]) < 2 / 3
    return np.where(used[..., None], x, 1e4).astype(dtype), used


def test_a_byte_holds_its_first_channel_in_the_lowest_bits():
    x = np.array([0, 1, 2, 3, 3, 0, 0, 1], np.float32).reshape(1, 1, 1, 8)
    pool = run(x, np.ones((1, 1, 1), bool), bits=2, group=8, axis="channels")
    assert np.asarray(pool.codes).ravel().tolist() == [0b11100100, 0b01000011]
    assert (pool.low.item(), pool.scale.item()) == (0, 1)


@pytest.mark.default("2-slots-float32", "4-channels-bfloat16", "4-slots-float16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", [2, 4])
def test_as_kivi_defines_it_and_never_off_by_more_than_half_a_step(bits, axis, dtype):
    x, used = random_pool(1, (2, 3, 45, 12), dtype)  # the last group smaller: 13 slots, 4 channels
    group = 16 if axis == "slots" else 8
    low, step, value = kivi(x, used, bits, group, axis)
    got, inside = np.float64(values_of(run(x, used, bits=bits, group=group, axis=axis))), used
    eps = float(jnp.finfo(dtype).eps)
    rounding = eps * (np.abs(low) + 2**bits * step)  # of the scale's dtype, and of the answer's
    assert (np.abs(got - np.float64(x)) <= step / 2 + rounding)[inside].all()
    # Where rounding the step moves a number across the border of two codes it ends up one step away from KIVI's.
    away = np.abs(got - value)[inside]
    assert (away <= (step + 2 * rounding)[inside]).all()
    assert np.mean(away <= 2 * rounding[inside]) > 1 - 2**bits * eps


@pytest.mark.parametrize("axis", AXES)
def test_constant_groups_are_exact_and_empty_ones_zero(axis):
    x, used = np.full((1, 2, 24, 8), 0.1, jnp.bfloat16), np.ones((1, 2, 24), bool)
    x[:, :, 8:16], used[:, :, 16:] = -77.7, False
    got = values_of(run(x, used, bits=2, group=8, axis=axis))
    np.testing.assert_array_equal(got, np.where(used[..., None], x, 0))


@pytest.mark.parametrize("bits", [2, 8])
def test_bytes_are_the_codes_and_two_numbers_per_group(bits):
    x, used = np.ones((2, 3, 80, 40), jnp.bfloat16), np.ones((2, 3, 80), bool)
    keys, values = (run(x, used, bits=bits, group=32, axis=axis) for axis in AXES)
    assert keys.nbytes == 2 * 80 * 3 * 40 * bits // 8 + 2 * 2 * (2 * 3 * 3 * 40)  # 80 slots: 3 groups
    assert values.nbytes == 2 * 80 * 3 * 40 * bits // 8 + 2 * 2 * (2 * 80 * 3 * 2)  # 40 channels: 2 groups


@pytest.mark.parametrize(
    ("options", "head_dim", "words"),
    [
        ({"bits": 3, "axis": "slots"}, 8, "bits=3"),
        ({"group": 0, "axis": "slots"}, 8, "group=0"),
        ({"bits": 2, "axis": "channels"}, 6, "6 channels of 2 bits"),
    ],
)
def test_what_cannot_be_packed_is_refused(options, head_dim, words):
    with pytest.raises(ValueError, match=words):
        quantize(np.ones((1, 4, 1, head_dim), np.float32), np.ones((1, 4, 1), bool), **options)


def test_xla_never_makes_an_array_of_the_whole_pool(monkeypatch):
    monkeypatch.setattr(ragged, "_sizes", blocks_of(256))
    slots = 4096
    x, used = random_pool(7, (1, 2, slots, 8))
    pools = (run(x, used, bits=4, axis="slots"), run(x, used, bits=4, axis="channels"))
    segment = np.zeros((1, 2), np.int32), np.full((1, 2), slots, np.int32)
    compiled = jax.jit(decode_attention).lower(np.zeros((1, 2, 8), np.float32), *pools, *segment).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes / 2
