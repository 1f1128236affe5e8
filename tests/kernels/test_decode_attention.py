"""decode_attention against float64 numpy: every kind of segment of a pool, and two parts made one."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import decode_attention, ragged
from pallas_kernels.decode_attention import xla

BATCH, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 2, 6, 2, 8, 75
IMPLEMENTATIONS = ["xla", "xla, heads together", "reference"]


@pytest.fixture(scope="module")
def pool():
    random = np.random.default_rng(2)
    q = 3 * random.standard_normal((BATCH, HEADS, HEAD_DIM))
    k, v = random.standard_normal((2, BATCH, KV_HEADS, SLOTS, HEAD_DIM))
    return tuple(x.astype(np.float32) for x in (q, k, v))


@cache
def attend(name):
    """An implementation, compiled once for each shape. Plain XLA reads all heads together or head by head.

    Blocks have 16 slots, of which three are read at a time.
    """
    name, *way = name.split(", ")
    run = jax.jit(partial(decode_attention, return_mass=True, implementation=name), static_argnames="softmax_n")

    def attend(*arrays, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xla, "target_platform", lambda: "cpu" if way else "gpu")
            patch.setattr(xla, "_MOST", 16)
            patch.setattr(ragged, "_sizes", lambda bound, entry, segments: (min(16, bound), 3))
            return run(*arrays, **options)

    return attend


either = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def expected(q, k, v, start, length):
    """Attention and log-sum-exp in float64."""
    return exact.segments(q, k, v, start, length, None)[:2]


whole = jax.jit(decode_attention, static_argnames=("softmax_n", "return_mass"))  # where nothing is patched


def check(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


SEGMENTS = (
    ([[0, 16], [32, 48]], [[1, 16], [17, 5]]),
    ([[0, 0], [0, 0]], [[75, 75], [75, 75]]),  # the whole pool
    ([[64, 58], [74, 48]], [[11, 17], [1, 27]]),  # up to the pool's last slot
    ([[3, 7], [21, 0]], [[0, 33], [2, 0]]),  # empty ones among others
    ([[0, 75], [16, 40]], [[0, 0], [0, 0]]),  # nothing but empty ones
    ([[5, 50], [0, 70]], [[70, 1], [31, 5]]),  # very different lengths, off the blocks
)


@either
def test_segments_of_every_kind(pool, name):
    for start, length in SEGMENTS:
        got = attend(name)(*pool, np.array(start), np.array(length))
        check(got, exact.segments(*pool, start, length, None))


@either
def test_peaked_attention_over_several_blocks_stays_finite_and_right(pool, name):
    q, k, v = pool
    out, lse, _ = attend(name)(500 * q, k, v, np.zeros((2, 2), int), np.full((2, 2), SLOTS))
    heads = np.repeat(k, 3, axis=1)
    best = np.argmax(np.einsum("bnh,bnph->bnp", q, heads), axis=-1)
    want = np.take_along_axis(np.repeat(v, 3, axis=1), best[..., None, None], axis=2)[:, :, 0]
    # The reference subtracts the log of the denominator, which is in the thousands: float32 has steps of 5e-4 there.
    np.testing.assert_allclose(out, want, rtol=1e-3 if name == "reference" else 1e-4, atol=1e-4)
    assert np.isfinite(lse).all()


def test_bfloat16_with_wide_heads_in_groups():
    """XLA for a CPU cannot multiply every order of axes in bfloat16."""
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal(shape).astype(jnp.bfloat16) for shape in ((1, 6, 64), *[(1, 2, 200, 64)] * 2))
    segment = np.zeros((1, 2), int), np.full((1, 2), 200)
    for got, want in zip(whole(q, k, v, *segment), expected(q, k, v, *segment), strict=True):
        np.testing.assert_allclose(got, want, atol=0.03)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("k", (BATCH, 4, SLOTS, HEAD_DIM)), ("start", (BATCH, HEADS)), ("length", (BATCH, 1))],
)
def test_what_does_not_fit_is_refused(pool, name, shape):
    arrays = dict(zip("qkv", pool, strict=True))
    arrays["start"] = arrays["length"] = np.ones((BATCH, KV_HEADS), np.int32)
    arrays[name] = np.ones(shape, arrays[name].dtype)
    if name == "k":
        arrays["v"] = arrays["k"]
    with pytest.raises(Exception, match="decode_attention"):
        jax.eval_shape(decode_attention, **arrays)


def test_a_loop_over_steps_converts_no_whole_pool():
    """XLA on a CPU computes bfloat16 in float32, and moves the conversion of what does not change out of a loop."""
    slots = 4096
    q, k, v = (np.ones((1, heads, n, 64), jnp.bfloat16) for heads, n in ((4, 1), (2, slots), (2, slots)))
    start, length = np.zeros((1, 2), np.int32), np.full((1, 2), 700, np.int32)

    def steps(q, k, v):
        def one(q, _):
            return decode_attention(q, k, v, start, length, implementation="xla")[0].astype(q.dtype), None

        return jax.lax.scan(one, q[:, :, 0], None, length=3)[0]

    text = jax.jit(steps).lower(q, k, v).compile().as_text()
    assert "bf16[1,2,4096,64]" in text
    assert not re.findall(r"= f32\[[\d,]*4096,64\]\S* (?:fusion|get-tuple-element)\(.*", text)
