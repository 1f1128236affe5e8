"""The gated delta rule and the layer around it against float64 numpy, token by token from the equations."""

from functools import partial

import jax
import numpy as np
import pytest

from tests import reference
from tests.models import Drawn
from vlkv.config import RecurrentConfig
from vlkv.decoder import delta_rule as module
from vlkv.decoder.delta_rule import CHUNK, delta_rule
from vlkv.decoder.recurrence import Recurrence

run = jax.jit(delta_rule)


def draw(length: int, seed: int = 0, batch: int = 2, groups: int = 2, heads: int = 6, h: int = 4, v: int = 5):
    """q, k, v, decay, rate and memory; keys have length 1."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, batch, length, groups, h))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, rate = -rng.exponential(0.3, (batch, length, heads)), rng.random((batch, length, heads))
    return q, k, rng.normal(size=(batch, length, heads, v)), decay, rate, rng.normal(size=(batch, heads, h, v))


def check(arguments, tolerance: float = 1e-5) -> None:
    out, memory = run(*(x.astype(np.float32) for x in arguments))
    for row, one in enumerate(zip(*arguments, strict=True)):
        wanted = reference.delta_rule(*one)
        for ours, theirs in zip((out[row], memory[row]), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=tolerance)


@pytest.mark.default("1-", "150-")
@pytest.mark.parametrize("length", [1, 3, 63, CHUNK, 65, 150], ids=lambda n: f"[{n}-")
def test_many_tokens_are_one_after_another(length):
    """Less than a chunk, whole chunks, and a last chunk that is not full."""
    check(draw(length))


def test_a_key_that_comes_again_and_again():
    """The worst case for an inverse in parts: all keys are equal, nothing decays, and values are replaced."""
    q, k, v, decay, rate, memory = draw(2 * CHUNK)
    check((q, np.broadcast_to(k[:, :1], k.shape), v, 0 * decay, 0 * rate + 0.999, memory))


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_inverse_of_each_platform(monkeypatch, platform):
    """Of random systems, and of the one whose inverse is hardest: ones below the diagonal."""
    monkeypatch.setattr(module, "target_platform", lambda: platform)
    lower = np.tril(np.random.default_rng(0).random((3, 2, CHUNK, CHUNK)), k=-1)
    lower[0] = np.tril(np.ones((CHUNK, CHUNK)), k=-1)
    found = jax.jit(partial(module._inverse))(lower.astype(np.float32))
    wanted = np.linalg.inv(np.eye(CHUNK) + lower)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_fast_decay():
    q, k, v, decay, rate, memory = draw(2 * CHUNK)
    check((q, k, v, 400 * decay, rate, memory))


CONFIG = RecurrentConfig(layers=(0,), key_heads=2, heads=6, key_dim=4, value_dim=5, taps=4)
ROWS = ((3, 14), (0, 9), (5, 19))  # tokens of each row: the first and the one after the last


@pytest.fixture(scope="module")
def layer() -> Recurrence:
    return Recurrence(12, CONFIG, 1e-6, init=Drawn(0))


def test_padding_changes_nothing(layer):
    """On both sides, and between tokens; the state goes on in a second call, also for a row that has no token in it."""
    x = np.random.default_rng(1).normal(size=(3, 40, 12)).astype(np.float32)
    valid = np.array([[start <= t < end for t in range(20)] for start, end in ROWS])
    valid[2, 8:11] = False
    later = valid[:, ::-1].copy()
    later[1] = False
    call = jax.jit(lambda layer, *given: layer(*given))
    first, state = call(layer, x[:, :20], None, valid)
    second, state = call(layer, x[:, 20:], state, later)
    for row in range(3):
        mask = np.concatenate([valid[row], later[row]])
        out, memory, newest = reference.recurrence(layer, np.float64(x[row][mask]))
        ours = np.concatenate([first[row], second[row]])[mask]
        np.testing.assert_allclose(ours, out, atol=1e-5)
        np.testing.assert_allclose(state.memory[row], memory, atol=1e-5)
        for ours, theirs in zip(state.newest, newest, strict=True):
            np.testing.assert_allclose(ours[row], theirs, atol=1e-5)
