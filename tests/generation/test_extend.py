"""Several turns: with the full cache as one prompt that holds them all; with others the first turn stays as it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from pallas_kernels import dequantize
from tests import programs, reference
from tests.generation.test_decode import kept_entries
from tests.mechanisms import IN_BITS
from tests.models import CONFIG, IMAGE_TOKEN, embed
from vlkv import policies

IMAGE = [IMAGE_TOKEN] * 25
extend = programs.extend
decode_step = programs.decode_step
fill_cache = programs.fill_cache


def turn(rows: list[list[int]], seed: int, padding: str = "right", width: int = 0) -> vlkv.Inputs:
    """A batch of these rows; pixels for as many images as they hold."""
    rng = np.random.default_rng(seed)
    longest = max(width, *map(len, rows))
    pads = [(longest - len(row), 0) if padding == "left" else (0, longest - len(row)) for row in rows]
    batch = {
        "input_ids": np.stack([np.pad(row, pad) for row, pad in zip(rows, pads, strict=True)]),
        "attention_mask": np.stack([np.pad(np.ones(len(row), int), pad) for row, pad in zip(rows, pads, strict=True)]),
    }
    images = sum(row.count(IMAGE_TOKEN) for row in rows) // len(IMAGE)
    if images:
        batch["pixel_values"] = rng.normal(size=(images, 3, 20, 20)).astype(np.float32)
    return vlkv.Inputs.from_hf(batch, CONFIG)


def own_tokens(inputs: vlkv.Inputs, row: int) -> list[int]:
    return inputs.tokens[row, inputs.valid[row]].tolist()


def words(*counts: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(6, 50, count).tolist() for count in counts]


@pytest.mark.full
def test_turns_with_the_full_cache_equal_one_prompt_that_holds_them_all(params, batch, read):
    """A turn with images in two of three rows, a turn of text, then two tokens; padding on the left, then right."""
    a, b, c = words(4, 9, 6, seed=5)
    second = turn([[*a[:2], *IMAGE, *a[2:]], b, [*IMAGE, *c]], seed=1, padding="left")
    third = turn(words(7, 2, 5, seed=6), seed=0)
    cache = fill_cache(read, policies.Full(), new_tokens=64)
    ours = []
    for inputs in (second, third):
        cache, logits = extend(params, cache, inputs)
        ours.append(logits)
    after = np.array(words(2, 2, 2, seed=7))
    for token in after.T:
        cache, logits = decode_step(params, cache, token)
        ours.append(logits)
    rows = [[own_tokens(x, row) for x in (batch, second, third)] + [after[row].tolist()] for row in range(3)]
    whole = turn([[token for part in parts for token in part] for parts in rows], seed=0)
    pixels = np.concatenate([batch.pixels[:2], second.pixels[:1], batch.pixels[2:3], second.pixels[1:2]])
    whole = dataclasses.replace(whole, pixels=pixels)
    theirs = np.asarray(programs.forward(params, whole))
    for row, parts in enumerate(rows):
        ends = np.cumsum([len(part) for part in parts[:-1]])
        for at, logits in zip([ends[1] - 1, ends[2] - 1, ends[2], ends[2] + 1], ours, strict=True):
            np.testing.assert_allclose(logits[row], theirs[row, at], atol=1e-4)
        assert cache.next_position[row].tolist() == [ends[2] + 2]
        assert int(cache.used[row]) == ends[2] + 2 - ends[0]


@pytest.mark.full
@pytest.mark.ci("CSP", "KIVI")
@pytest.mark.parametrize(
    "policy",
    [policies.CSP(keep=0.3), policies.KIVI(bits=4), policies.TurboQuant(bits=3), *IN_BITS.values()],
    ids=lambda p: type(p).__name__,
)
def test_a_compressed_first_turn_stays_as_it_is(params, batch, read, policy):
    """Against float64 numpy, which attends to just the kept entries and to all that came after them."""
    said = words(5, 8, 3, seed=8)
    cache = fill_cache(read, policy, new_tokens=12)
    after, logits = extend(params, cache, turn(said, seed=0, padding="left"))
    for name in ("k", "v", "token", "start", "extent"):
        for before, now in zip(*(jax.tree.leaves(getattr(x, name)) for x in (cache, after)), strict=True):
            np.testing.assert_array_equal(before, now)
    after, next_logits = decode_step(params, after, np.array([7, 8, 9]))
    x = np.asarray(embed(params, batch))
    for row in range(3):
        _, layers = reference.prefill(params.decoder, x[row, batch.valid[row]])
        kept = kept_entries(cache, batch, row)
        if policies.slots_of(policy).storage is not None:
            layers = [(q, *held) for (q, _, _), held in zip(layers, as_stored(cache, layers, batch, row), strict=True)]
        fed = [*said[row], 7 + row]
        theirs = reference.decode(params.decoder, layers, kept, fed, policies.slots_of(policy).softmax_n)
        np.testing.assert_allclose(logits[row], theirs[-2], atol=1e-4)
        np.testing.assert_allclose(next_logits[row], theirs[-1], atol=1e-4)


def as_stored(cache, layers, batch, row):
    """Keys and values as the quantised pool gives them back, in the order of the row's own tokens."""
    pool_k, pool_v = (np.asarray(dequantize(x))[row] for x in (cache.k, cache.v))
    place = np.cumsum(batch.valid[row]) - 1
    for i, layer in enumerate(layers):
        k, v = (array.copy() for array in layer[1:])
        for head in range(k.shape[1]):
            slots = int(cache.start[i, row, head]) + np.arange(int(cache.counts[i, row, head]))
            tokens = place[np.asarray(cache.token)[row, head, slots]]
            k[tokens, head], v[tokens, head] = pool_k[head, slots], pool_v[head, slots]
        yield k, v


ONE_BY_ONE = {
    "steps": policies.AVL(keep=0.5, refresh=2, text=0.5),
    "window of full precision": policies.KIVI(bits=2, group=4, window=4),
    "quantised tail": policies.compose(
        policies.SnapKV(keep=0.4, window=2), store=policies.TurboQuant(bits=3, tail=True)
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_turn_is_as_many_steps_as_it_has_tokens(params, read, name):
    """Padding is no step; `decode_step` is held by other tests."""
    said = words(11, 8, 3, seed=9)
    cache = fill_cache(read, ONE_BY_ONE[name], new_tokens=16)
    after, logits = extend(params, cache, turn(said, seed=0, padding="left"))
    for i, tokens in enumerate(np.stack([np.pad(row, (0, 11 - len(row))) for row in said], axis=1)):
        cache, theirs = decode_step(params, cache, tokens)
        for row in (row for row in range(3) if len(said[row]) == i + 1):
            np.testing.assert_allclose(logits[row], theirs[row], atol=1e-4)
            if (ours := after.decode_states) is not None:
                np.testing.assert_array_equal(ours.stored[:, row], cache.decode_states.stored[:, row])
                np.testing.assert_array_equal(ours.attended[:, row], cache.decode_states.attended[:, row])
    assert after.used.tolist() == [11, 8, 3]


def test_a_tail_that_is_too_small_is_refused_where_its_size_is_known(params, read):
    logits, tokens = read.logits, jnp.full(3, 7)
    cache = fill_cache(read, policies.Full(), new_tokens=12)
    sampling = vlkv.Greedy(max_new_tokens=14, stop=())
    for decode in (vlkv.decode, programs.decode):
        with pytest.raises(vlkv.InputError, match=r"capacity for 12 new tokens, 0 of them used, and 13 more.*resize"):
            decode(params, cache, logits, sampling=sampling)
    with pytest.raises(vlkv.InputError, match=r"capacity for 12 new tokens"):
        vlkv.log_probabilities(params, cache, logits, np.full((3, 14), 7))
    full = dataclasses.replace(cache, used=np.array([0, 12, 3], np.int32))
    with pytest.raises(vlkv.InputError, match=r"capacity for 12 new tokens, 12 of them used, and 1 more"):
        vlkv.decode_step(params, full, tokens)


def test_too_little_room_is_said_before_anything_is_compiled(params, read):
    cache, inputs = fill_cache(read, policies.Full(), new_tokens=12), turn(words(5, 13, 3, seed=8), seed=0)
    with pytest.raises(vlkv.InputError, match=r"capacity for 12 new tokens, and 13 are needed.*new_tokens=13"):
        vlkv.extend(params, cache, inputs)
    _, logits = extend(params, cache, inputs)
    assert np.isnan(logits).all(axis=1).tolist() == [False, True, False], "under jit the row without room"
    with pytest.raises(vlkv.InputError, match="3 rows, but the inputs have 1"):
        vlkv.extend(params, cache, turn(words(4, seed=1), seed=0))
    cache = dataclasses.replace(cache, next_position=cache.next_position + 445)
    with pytest.raises(vlkv.InputError, match=r"would have 514 tokens, the model's limit is 512"):
        vlkv.extend(params, cache, turn(words(5, 5, 5, seed=8), seed=0))
