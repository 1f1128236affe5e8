"""A-VL's ordinary steps do not read what is stored but not in the core, whatever it holds."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from pallas_kernels import Kernels
from tests import programs
from tests.cache.test_decode_state import one_layer
from tests.models import CONFIG, IMAGE_TOKEN, padded, random_model
from vlkv import policies
from vlkv.cache.attention import _listed, attend_to
from vlkv.cache.decode_state import arrive, begin

LENGTH, HEADS, GROUPS, DIM, NEW = 70, 2, 2, 8, 4


@pytest.fixture(scope="module")
def step():
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(n, LENGTH, DIM)).astype(np.float32) for name, n in zip("qkv", (4, 2, 2))}  # noqa: B905
    arrays["is_vision"] = (np.arange(LENGTH) >= 8) & (np.arange(LENGTH) < 58)
    cache, _ = one_layer(policies.AVL(keep=0.6, core=0.2, refresh=2), arrays, new_tokens=NEW)
    q = jnp.array(rng.normal(size=(1, HEADS * GROUPS, DIM)), jnp.float32)
    tail = jnp.array(rng.normal(size=(2, 1, HEADS, NEW, DIM)), jnp.float32)
    return cache, jax.jit(jax.vmap(arrive))(cache.decode_states[0])[0], q, tail


def answer(step, state, k, v, kernels=None):
    cache, _, q, tail = step
    segment = k, v, cache.start[0], cache.extent[0]
    run = jax.jit(attend_to, static_argnames="kernels")
    return run(q, segment, tuple(tail), jnp.array([1]), state, kernels=kernels)


@pytest.mark.full
def test_an_ordinary_step_does_not_read_what_is_not_in_the_core(step):
    cache, state, _, _ = step
    most = state.attended.shape[-1] - NEW
    aside = np.asarray(state.stored & ~state.attended)[0, 0, :most]
    assert aside.sum() == 30 - 10 and state.core_only.all()
    start = int(cache.start[0, 0, 0])
    slots = start + np.flatnonzero(aside)
    poisoned = (cache.k.at[:, :, slots].set(jnp.nan), cache.v.at[:, :, slots].set(jnp.nan))
    for got, want in zip(answer(step, state, *poisoned), answer(step, state, cache.k, cache.v), strict=True):
        np.testing.assert_array_equal(got, want)
    refreshed = jax.vmap(cache.policy.updater.step)(state, jnp.zeros((1, HEADS * GROUPS, most + NEW)))
    assert not refreshed.core_only.any()  # the second step is a refresh: it reads everything
    assert np.isnan(answer(step, refreshed, *poisoned)[0]).any()


@pytest.mark.parametrize(("fraction", "count"), [(0.53, 4300), (0.29, 100)])
def test_core_and_text_window_are_rounded_down_from_the_exact_product(fraction, count):
    """Of the tokens of an image, or of text. The first loses a token in float32, the second in double precision."""
    expected = int(Fraction(str(fraction)) * count)
    policy = policies.AVL(keep=0.6, core=fraction, text=fraction)
    everything = jnp.ones(count, bool)
    for is_vision, new in ((everything, 1), (~everything, 0)):
        state = jax.jit(begin, static_argnames="new_tokens")(
            everything[None], {}, is_vision, everything, new_tokens=new
        )
        if new:
            assert policy.pick(state, jnp.zeros(state.stored.shape)).sum() == expected
        else:
            assert policy.window(state) == expected


@pytest.mark.full
def test_kernels_by_name_give_the_same_answer(step):
    cache, state, _, _ = step
    named = Kernels(decode_attention="reference", core_attention="reference")
    for got, want in zip(
        answer(step, state, cache.k, cache.v, named), answer(step, state, cache.k, cache.v), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_where_heads_differ_no_list_is_used(step):
    _, state, _, _ = step
    policy = policies.AVL(keep=0.6, core=0.2, refresh=5)
    core = state.core.at[0, 1].set(jnp.roll(state.core[0, 1], 1))
    one = jax.tree.map(lambda x: x[0], dataclasses.replace(state, core=core))
    made = jax.jit(policy.prepare)(one)
    assert made.core_only and not _listed(made)[-1] and (made.attended[0] != made.attended[1]).any()


@pytest.fixture(scope="module")
def picture():
    """A model with heads of 128 channels, and prompts with an image of 576 tokens."""
    config = dataclasses.replace(
        CONFIG, decoder=dataclasses.replace(CONFIG.decoder, layers=1, head_dim=128, max_positions=1024),
        vision=dataclasses.replace(CONFIG.vision, image_size=96),
    )  # fmt: skip
    rows = [[1, 7, 8, *[IMAGE_TOKEN] * 576, 9, 10, 11], [1, *[IMAGE_TOKEN] * 576, 9, 10]]
    pixels = np.random.default_rng(0).normal(size=(2, 3, 96, 96)).astype(np.float32)
    return random_model(config), vlkv.Inputs.from_hf({**padded(rows), "pixel_values": pixels}, config)


@pytest.mark.full
@pytest.mark.parametrize("swap", [None, "mosaic_tpu:interpret"])
def test_a_tpu_reads_a_tenth_of_the_image_in_a_core_step(picture, simulated_copies, swap):
    """Core entries, scattered over the image, are brought together; answers and stored tokens stay the same."""
    policy, caches, logits, sizes = policies.AVL(keep=0.5, core=0.1, refresh=3), [], [], []
    packed, _ = jax.jit(lambda *a: vlkv.prefill(*a, policy=policy, new_tokens=8))(*picture)
    step = programs.decode_step
    for kernels in (Kernels(), Kernels(core_attention="mosaic_tpu:interpret", swap_slots=swap)):
        cache = dataclasses.replace(packed, kernels=kernels)
        for _ in range(5):
            simulated_copies.clear()
            cache, found = step(picture[0], cache, jnp.array([3, 4]))
            logits.append(np.asarray(found))
            sizes.append(sum(size for shape, size in simulated_copies if shape[-2] > 1))  # one slot is an exchange
        caches.append(cache)
    np.testing.assert_allclose(logits[5:], logits[:5], rtol=1e-4, atol=1e-5)
    core, of_slot = 57, 2 * 2 * 2 * 128 * 4  # rows, heads, keys and values, channels, bytes
    for n in (0, 1, 3, 4):  # the third step attends to everything, by another op
        assert core * of_slot < sizes[5 + n] - 16 * of_slot <= 1.2 * core * of_slot, "with one tile of text"
    plain, grouped = caches
    assert (grouped.decode_states[0].core[..., :64].sum(-1) == core).all(), "in four tiles"
    assert (plain.decode_states[0].core[..., :64].sum(-1) < core).all()
    for row, head in np.ndindex(2, 2):
        entries = []
        for cache in caches:
            state, order = cache.decode_states[0], np.argsort(cache.entries(0, 292)[row, head], kind="stable")
            of_state = [np.asarray(x)[row, head][order] for x in (state.place, state.core, state.stored)]
            slots = int(cache.start[0, row, head]) + order
            entries.append([*of_state, *(np.asarray(x)[row, head, slots] for x in (cache.token, cache.k, cache.v))])
        for a, b in zip(*entries, strict=True):
            np.testing.assert_array_equal(a, b)


def test_equal_shares_choose_the_earlier_token_wherever_it_is_stored():
    policy, count = policies.AVL(keep=0.6, core=0.3), 20
    order = np.random.default_rng(0).permutation(count)
    state = begin(jnp.ones((1, count), bool), {}, jnp.ones(count, bool), jnp.ones(count, bool), new_tokens=0)
    state = dataclasses.replace(state, place=jnp.array(order)[None])
    chosen = policy.pick(state, jnp.zeros((1, count)).at[0, 7].set(1.0))
    rest = [place for place in range(count) if place != order[7]][:5]
    assert set(order[np.flatnonzero(chosen[0])]) == {order[7], *rest}
