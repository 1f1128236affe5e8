"""RDKV against a float64 numpy simulation: bits, kept tokens, stored numbers and logits; and its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from pallas_kernels import dequantize
from tests import models, programs, reference
from tests.policies.numpy_policies import attention
from vlkv import policies
from vlkv.cache.stored import StoredTokens
from vlkv.compression.sizes import cache_spec
from vlkv.policies import rdkv

BITS = (0, 2, 4, 8, 16)
ERRORS = {"keys": (1, 0.277, 0.011, 0.000061, 0), "values": (1, 0.312, 0.0138, 0.000048, 0)}
DECODED = [7, 8, 9]
prefill = programs.prefill
step = programs.decode_step
divide = rdkv.divide


def knapsack(scores, errors, most):
    """The bits of least cost for the smallest lambda with at most `most` bits in all, of those at which bits change."""
    errors = np.array(errors, float)
    gains = [(errors[i] - errors[j]) / (BITS[j] - BITS[i]) for i in range(5) for j in range(i + 1, 5)]
    for price in [0.0, *sorted(np.outer(scores, gains).ravel() * (1 + 1e-12))]:
        cost = scores[:, None] * errors + price * np.array(BITS)
        bits = np.array(BITS)[cost.argmin(axis=1)]
        if bits.sum() <= most:
            return bits
    raise AssertionError


def simulated(q, k, v, budget, policy):
    """Which tokens a layer keeps [K, T], and its keys and values as they are stored [K, T, H]; zeros elsewhere."""
    slots = policies.slots_of(policy)
    window, kernel, key_bits = (getattr(slots.store, name) for name in ("window", "kernel", "key_bits"))
    (heads, length, head_dim), half = k.shape, min(kernel // 2, k.shape[1] - 1)
    groups, window = len(q) // heads, min(window, length)
    rows = attention(q, k)[:, -window:].reshape(heads, groups * window, length).sum(axis=1)
    rows /= groups * np.minimum(np.arange(length, 0, -1), window)
    padded = np.pad(rows, [(0, 0), (half, half)], mode="reflect")
    scores = np.stack([padded[:, i : i + length] for i in range(2 * half + 1)]).mean(axis=0)
    if slots.score != slots.store:
        scores = by_norm(k)
    kept, keys, values = np.zeros((heads, length), bool), np.zeros(k.shape), np.zeros(v.shape)
    for head in range(heads):
        bits = knapsack(scores[head], ERRORS["values"], (32 - key_bits) * budget)
        kept[head] = bits > 0
        for token in np.flatnonzero(bits):
            values[head, token] = quantized(v[head, token], bits[token])
        squares = (q.reshape(heads, groups, length, head_dim)[head, :, -window:] ** 2).mean(axis=(0, 1))
        entries = -(-kept[head].sum() // 4) * 4  # in whole bytes
        most = key_bits * budget * head_dim // (2 * entries) * 2
        for channel, bits in enumerate(knapsack(squares * (k[head] ** 2).mean(axis=0), ERRORS["keys"], most)):
            keys[head, kept[head], channel] = quantized(k[head, kept[head], channel], bits)
    return kept, keys, values


def by_norm(k):
    """Knorm's scores, the mean of three tokens, shifted so that the lowest is 0."""
    scores = -np.linalg.norm(k, axis=-1)
    means = [scores[:, max(0, token - 1) : token + 2].mean(axis=1) for token in range(k.shape[1])]
    return np.stack(means, axis=1) - np.min(means, axis=0)[:, None]


def quantized(x, bits):
    if bits == 0:
        return np.zeros(len(x))
    scale = (x.max() - x.min()) / (2**bits - 1)
    return x.min() + np.round((x - x.min()) / scale) * scale


@pytest.mark.default("few")
@pytest.mark.ci("few", "unequal", "other scores")
@pytest.mark.parametrize(
    "policy",
    [
        policies.RDKV(keep=0.1, window=4),
        policies.RDKV(budget=6, kernel=1, key_bits=20),
        policies.RDKV(keep=1.0),
        policies.compose(policies.Knorm(keep=0.1), smooth=policies.Smooth(3), store=policies.RDKV),
    ],
    ids=["few", "unequal", "all", "other scores"],
)
def test_what_is_kept_stored_and_answered(params, batch, policy):
    cache, _ = prefill(params, batch, policy, new_tokens=8)
    kept = StoredTokens.of(cache, batch.valid.shape[1]).mask()
    pools = [np.float64(dequantize(x)) for x in (cache.k, cache.v)]
    token, start = np.asarray(cache.token), np.asarray(cache.start)
    logits = []
    for i in range(len(DECODED)):
        cache, now = step(params, cache, np.full(3, DECODED[i]))
        logits.append(now)
    x = np.asarray(models.embed(params, batch))
    for row in range(3):
        inside = batch.valid[row]
        count, layers = int(inside.sum()), reference.prefill(params.decoder, x[row, inside])[1]
        total = 2 * policy.budget if policy.keep is None else max(2, int(np.floor(policy.keep * 2 * count + 0.5)))
        held = []
        for i, (q, k, v) in enumerate(layers):
            heads_first, whole = (y.swapaxes(0, 1) for y in (q, k, v)), min(total, 2 * count) // 2
            want, *numbers = simulated(*heads_first, whole, policy)
            np.testing.assert_array_equal(kept[i, row][:, inside], want)
            assert policy.keep != 1 or want.all()
            for head in range(2):
                slots = start[i, row, head] + np.arange(want[head].sum())
                at = np.searchsorted(np.flatnonzero(inside), token[row, head, slots])
                for pool, one in zip(pools, numbers, strict=True):
                    np.testing.assert_allclose(pool[row, head, slots], one[head, at], atol=2e-4)
            held.append((q, *(y.swapaxes(0, 1) for y in numbers)))
        theirs = reference.decode(params.decoder, held, kept[:, row][..., inside], DECODED)
        np.testing.assert_allclose(np.stack(logits)[:, row], theirs, atol=1e-3)


@pytest.mark.parametrize(
    ("policy", "pinned"),
    [
        (policies.compose(policies.Knorm(keep=0.1), store=policies.RDKV, first=2), slice(2)),
        (policies.compose(policies.H2O(keep=0.1, recent=3, evict=False), store=policies.RDKV), slice(-3, None)),
    ],
    ids=["first", "recent"],
)
def test_tokens_that_are_kept_in_any_case_get_bits(policy, pinned):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 2, 64, 8)).astype(np.float32)
    k[:, :, :2] *= 9
    q[:, :, -3:] = k[:, :, -3:] = 0
    selection = programs.select(policy, q, k, v, np.zeros(64, bool))
    assert np.all(selection.kept[..., pinned])
    np.testing.assert_array_equal(selection.kept, selection.extra["rank"]["digits"].values > 0)


@pytest.mark.parametrize("errors", [ERRORS["keys"][1:4], (0.9, 0.1, 0.05)], ids=["convex", "2 bits never"])
def test_bits_are_those_of_least_cost(errors):
    random = np.random.default_rng(0)
    scores = random.exponential(size=(6, 40)) ** 3
    most = np.array([0, 1, 9, 57, 200, 400])
    digits = np.asarray(divide(jnp.array(scores, jnp.float32), jnp.array(most), rdkv.steps_of(errors)))
    for row, number in enumerate(most):
        np.testing.assert_array_equal(2 * digits[row], knapsack(scores[row], (1, *errors, 0), 2 * number))


def test_equal_scores_get_bits_in_the_order_of_the_tokens():
    """All of them have bits at one lambda and none at the next larger one, and so do scores of 0 with lambda 0."""
    steps = rdkv.steps_of(ERRORS["values"][1:4])
    scores = jnp.array([[1.0, 1, 1, -1], [0, 0, 5, 0]])
    digits = divide(scores, jnp.array([5, 11]), steps)
    assert digits.tolist() == [[2, 2, 1, 0], [1, 1, 8, 1]]


@pytest.mark.parametrize("scope", ["all", "vision"])
def test_bytes_are_those_of_the_budget_in_full_precision(scope):
    """Codes have just the bytes of SnapKV's keys and values in bfloat16; ranges and tables come on top."""
    layers, head_dim, vision, text = 4, 128, 960, 40
    policy, snap = (method(keep=0.1, scope=scope) for method in (policies.RDKV, policies.SnapKV))
    spec, other = (cache_spec(p, layers=layers, vision=vision, text=text, new_tokens=1) for p in (policy, snap))
    whole = 100 if scope == "all" else 96 + 40
    assert other.slots == layers * whole
    entries = 8 * 100 if scope == "all" else 8 * 96 + 40  # of a layer, if all have 2 bits, or 16 bits (text)
    assert spec.slots == layers * entries
    slots = -(-entries // 16) * 16
    ranges = 5 * (slots + head_dim)  # a scale, a minimum and a number of digits of each value and of each key channel
    assert spec.pool_bytes(head_dim, 2) == layers * (whole * 2 * 2 * head_dim + ranges)


def test_options_that_cannot_be():
    for options, rule in (
        ({"kernel": 4}, "odd"),
        ({"key_bits": 15}, "even"),
        ({"key_bits": 30}, "8, 24"),
        ({"value_errors": (0.3, 0.4, 0.1)}, "fall"),
        ({"cap": 2.0}, "cap"),
    ):
        with pytest.raises(vlkv.InputError, match=rule):
            policies.RDKV(keep=0.1, **options)


def test_slots_that_a_mesh_splits_are_refused(params, batch):
    mesh = jax.sharding.AbstractMesh((3,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(vlkv.InputError, match="divides the 2 columns"):
        jax.eval_shape(lambda p: vlkv.prefill(p, batch, policies.RDKV(keep=0.1), new_tokens=1), params)
