"""Every op on every backend that this host can run, interpreters included, against float64 numpy.

One table of cases, in which every two values of two factors meet at least once. Every case has segments of length 0,
of 1, of some odd length and of the whole pool, at different places.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from benchmarks import exact
from pallas_kernels import write_slots
from pallas_kernels.dispatch import IMPLEMENTATIONS, available

BATCH, KV_HEADS, SLOTS, ROWS = 2, 2, 96, 37
GROUPS, HEAD_DIMS = (1, 7, 8), (64, 80, 96, 128)
STATISTICS = ("sum", "square", "count")


def case(g: int, h: int) -> dict:
    return {
        "groups": GROUPS[g],
        "head_dim": HEAD_DIMS[h],
        "dtype": (jnp.float32, jnp.bfloat16)[(g + h) % 2],
        "softmax_n": (0.0, 1.0, 4.0)[(g + h) % 3],
        "masked": "011111001000"[4 * g + h] == "1",
        "flag": "011110101000"[4 * g + h] == "1",  # with the mass; rows gathered
    }


CASES = [case(g, h) for g in range(3) for h in range(4)]


def runs(op: str):
    """(implementation, number of the case): interpreters, which are slow, take every fifth."""
    names = available(IMPLEMENTATIONS[op])
    for name in names:
        for i in range(len(CASES)):
            if not name.endswith(":interpret") or i % 5 == 0:
                yield pytest.param(name, i, id=f"{name}-{i}")


def twice(op: str, implementation: str, *args, **options):
    """What an op returns, having returned the same bits twice if it is not interpreted."""
    f = getattr(pallas_kernels, op)

    @jax.jit
    def run(*args):
        return f(*args[:-1], **args[-1], **options, implementation=implementation)

    arrays = {name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)}
    try:
        first = run(*args, arrays)
    except ValueError as error:
        if "cannot run this" not in str(error):
            raise
        pytest.skip(str(error))
    if not implementation.endswith(":interpret"):
        jax.tree.map(np.testing.assert_array_equal, first, run(*args, arrays))
    return first


def segments(i: int):
    """Starts and lengths [B, K]: empty, one slot, off the blocks, the whole pool; turned from case to case."""
    start, length = np.roll([[16, 0], [48, 0], [16, 37], [0, SLOTS]], i, axis=0).T
    return start.reshape(BATCH, KV_HEADS), length.reshape(BATCH, KV_HEADS)


def pool(random, c: dict):
    shape = BATCH, KV_HEADS * c["groups"], c["head_dim"]
    q = (2 * random.standard_normal(shape)).astype(c["dtype"])
    k, v = random.standard_normal((2, BATCH, KV_HEADS, SLOTS, c["head_dim"]))
    return q, k.astype(c["dtype"]), v.astype(c["dtype"])


def tolerance_of(implementation, dtype):
    """References compute in float32 whatever the dtype."""
    return 5e-5 if dtype == jnp.float32 or implementation == "reference" else 0.02


def check(got, want, tolerance):
    for g, w in zip(got, want, strict=False):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


@pytest.mark.default("xla-0", "interpret-5")
@pytest.mark.parametrize(("implementation", "i"), runs("decode_attention"))
def test_decode_attention(implementation, i):
    c, random = CASES[i], np.random.default_rng(i)
    q, k, v = pool(random, c)
    start, length = segments(i)
    allowed = random.random((BATCH, KV_HEADS, SLOTS)) < (0.6 if c["masked"] else 1.1)
    options = {"valid": allowed} if c["masked"] else {}
    got = twice(
        "decode_attention", implementation, q, k, v, start, length,
        softmax_n=c["softmax_n"], return_mass=c["flag"], **options,
    )  # fmt: skip
    want = exact.segments(q, k, v, start, length, allowed, c["softmax_n"])
    check(got, want, tolerance_of(implementation, c["dtype"]))


@pytest.mark.default("xla-0", "interpret-5")
@pytest.mark.parametrize(("implementation", "i"), runs("core_attention"))
def test_core_attention(implementation, i):
    c, random = CASES[i], np.random.default_rng(i)
    q, k, v = pool(random, c)
    start, length = np.array([[0, 16], [0, 0]]), np.array([[70, 49], [33, SLOTS]])
    text = np.array([[50, 49], [32, 80]])  # the second has none
    count = np.roll([0, 31], i)
    rows = np.stack([np.sort(random.permutation(least)[:31]) for least in text.min(axis=1)])
    allowed = np.arange(SLOTS) >= text[..., None]
    for b in range(BATCH):
        allowed[b, :, rows[b, : count[b]]] = True
    options = {}
    if c["masked"]:
        valid = random.random(allowed.shape) < 0.6
        allowed, options = allowed & valid, {"valid": valid}
    got = twice(
        "core_attention", implementation, q, k, v,
        start, length, rows, count, text, softmax_n=c["softmax_n"], return_mass=c["flag"], **options,
    )  # fmt: skip
    want = exact.segments(q, k, v, start, length, allowed, c["softmax_n"])
    check(got, want, tolerance_of(implementation, c["dtype"]))


@pytest.mark.default("xla-0", "interpret-5")
@pytest.mark.parametrize(("implementation", "i"), runs("write_slots"))
def test_write_slots(implementation, i):
    """Into a column for each head and into one for all; a slot before the first and one past the end; a whole tile."""
    c, random = CASES[i], np.random.default_rng(i)
    slots = (100, 256, 300)[i % 3]  # the lanes of less than a tile, of whole tiles, and of an incomplete last tile
    for columns in (1, KV_HEADS):
        x = random.standard_normal((BATCH, columns, slots, c["head_dim"])).astype(c["dtype"])
        new = random.standard_normal((BATCH, KV_HEADS, c["head_dim"])).astype(c["dtype"])
        slot = np.array([[slots - 1, slots // 2 + 1], [slots, -1]] if c["flag"] else [[7, slots // 2], [0, slots - 1]])
        want = x.copy()
        for b, head in np.ndindex(BATCH, KV_HEADS):
            if 0 <= slot[b, head] < slots:
                want[b, head % columns, slot[b, head]] = new[b, head]
        np.testing.assert_array_equal(twice("write_slots", implementation, x, new, slot), want)


@pytest.mark.default("xla-0", "interpret-0")
@pytest.mark.parametrize(("implementation", "i"), runs("swap_slots"))
def test_swap_slots(implementation, i):
    """Neighbours and single slots, all pairs of a row and none; for a TPU the head dim fills the lanes."""
    c, random = CASES[i], np.random.default_rng(i)
    head_dim = 128 if implementation.startswith("mosaic") else c["head_dim"]
    pools = [random.standard_normal((3, KV_HEADS, SLOTS, head_dim)) for _ in "kv"]
    pools = [x.astype(c["dtype"]) for x in pools]
    first, second = (np.stack([np.sort(random.permutation(n)[:19]) for _ in range(3)]) for n in (48, 48))
    second, count = second + 48, np.array([19, 0, 5])
    want = [x.copy() for x in pools]
    for x, old, b in ((x, old, b) for x, old in zip(want, pools, strict=True) for b in range(3)):
        a, z = first[b, : count[b]], second[b, : count[b]]
        x[b][:, a], x[b][:, z] = old[b][:, z], old[b][:, a]
    got = twice("swap_slots", implementation, tuple(pools), first, second, count)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def prompt(random, c: dict):
    """Queries, keys, which keys exist, and the place of each row, in order or of a few gathered ones."""
    heads = KV_HEADS * c["groups"]
    rows = 5 if c["flag"] else ROWS
    q = random.standard_normal((heads, rows, c["head_dim"])).astype(c["dtype"])
    k = random.standard_normal((KV_HEADS, ROWS, c["head_dim"])).astype(c["dtype"])
    mask = random.random(ROWS) < (0.7 if c["masked"] else 1.1)
    place = np.sort(random.permutation(ROWS)[:rows])
    return q, k, mask, place


@pytest.mark.default("xla-4", "interpret-5")
@pytest.mark.parametrize(("implementation", "i"), runs("attention_mass"))
def test_attention_mass(implementation, i):
    c, random = CASES[i], np.random.default_rng(i)
    q, k, mask, place = prompt(random, c)
    statistic = STATISTICS[i % 3] if c["dtype"] == jnp.float32 else STATISTICS[i % 2]  # rounding would move a count
    p, allowed = exact.probabilities(q, k, mask, place, softmax_n=c["softmax_n"])
    if statistic == "square":
        p = p**2
    elif statistic == "count":
        p = allowed & (p >= 0.3 * p.max(-1, keepdims=True))
    row_weight = random.random((2, len(place)))
    options = {"row_place": place} if c["flag"] else {}
    got = twice(
        "attention_mass", implementation, q, k, row_weight=row_weight.astype(np.float32),
        key_mask=mask, softmax_n=c["softmax_n"], statistic=statistic, threshold=0.3, **options,
    )  # fmt: skip
    check([got], [np.einsum("rt,nts->rns", row_weight, p)], tolerance_of(implementation, c["dtype"]))


@pytest.mark.default("xla-4", "interpret-5")
@pytest.mark.parametrize(("implementation", "i"), runs("attention_mass_rows"))
def test_attention_mass_rows(implementation, i):
    c, random = CASES[i], np.random.default_rng(i)
    q, k, mask, place = prompt(random, c)
    p, _ = exact.probabilities(q, k, mask, place, softmax_n=c["softmax_n"])
    key_weight = random.random((2, ROWS))
    options = {"row_place": place} if c["flag"] else {}
    got = twice(
        "attention_mass_rows", implementation, q, k, key_weight=key_weight.astype(np.float32),
        key_mask=mask, softmax_n=c["softmax_n"], **options,
    )  # fmt: skip
    check([got], [np.einsum("rs,nts->rnt", key_weight, p)], tolerance_of(implementation, c["dtype"]))


def test_slots_past_the_end_are_not_written():
    x = jnp.zeros((1, 2, 128, 8))
    write = jax.jit(partial(write_slots, implementation="mosaic_tpu:interpret"))
    got = write(x, jnp.ones((1, 2, 8)), jnp.array([[128, 3]]))
    np.testing.assert_array_equal(got, np.zeros(x.shape) + (np.arange(256).reshape(1, 2, 128, 1) == 128 + 3))
