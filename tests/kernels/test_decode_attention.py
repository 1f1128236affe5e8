"""decode_attention against float64 numpy: every kind of segment of a pool, and two parts made one."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import combine, decode_attention, ragged
from pallas_kernels.decode_attention import together, xla

BATCH, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 2, 6, 2, 8, 75
IMPLEMENTATIONS = ["xla", "xla, heads together", "reference"]


def blocks_of(entries):
    """Blocks of so many entries, three at a time."""
    return lambda bound, entry, segments: (min(entries, bound), 3)


@pytest.fixture(scope="module")
def pool():
    random = np.random.default_rng(2)
    q = 3 * random.standard_normal((BATCH, HEADS, HEAD_DIM))
    k, v = random.standard_normal((2, BATCH, KV_HEADS, SLOTS, HEAD_DIM))
    return tuple(jnp.array(x, jnp.float32) for x in (q, k, v))


@pytest.fixture
def chosen(request, monkeypatch):
    """The name of an implementation. Plain XLA reads all heads together, in blocks of 16 slots, or head by head."""
    name, *way = request.param.split(", ")
    monkeypatch.setattr(xla, "target_platform", lambda: "cpu" if way else "gpu")
    monkeypatch.setattr(together, "_MOST", 16)
    return name


either = pytest.mark.parametrize("chosen", IMPLEMENTATIONS, indirect=True)


def expected(q, k, v, start, length):
    """Attention and log-sum-exp in float64."""
    return exact.segments(q, k, v, start, length, None)[:2]


def attend(*arrays, valid=None, **options):
    """In one program, made anew each time: tests change what is chosen while it is traced."""
    return jax.jit(functools.partial(decode_attention, **options))(*arrays, valid=valid)


whole = jax.jit(decode_attention, static_argnames=("softmax_n", "return_mass"))  # where nothing is patched


def check(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.default("start1-length1-5 chunks-xla")
@either
@pytest.mark.parametrize("chunk", [16, 256], ids=["5 chunks", "1 chunk"])
@pytest.mark.parametrize(
    ("start", "length"),
    [
        ([[0, 16], [32, 48]], [[1, 16], [17, 5]]),
        ([[0, 0], [0, 0]], [[75, 75], [75, 75]]),  # the whole pool
        ([[64, 58], [74, 48]], [[11, 17], [1, 27]]),  # up to the pool's last slot
        ([[3, 7], [21, 0]], [[0, 33], [2, 0]]),  # empty ones among others
        ([[0, 75], [16, 40]], [[0, 0], [0, 0]]),  # nothing but empty ones
        ([[5, 50], [0, 70]], [[70, 1], [31, 5]]),  # very different lengths, off the chunks
    ],
)
def test_segments_of_every_kind(pool, monkeypatch, chosen, chunk, start, length):
    monkeypatch.setattr(ragged, "_sizes", blocks_of(chunk))
    got = attend(*pool, jnp.array(start), jnp.array(length), implementation=chosen)
    check(got, expected(*pool, start, length))


@either
def test_slots_outside_the_segment_do_not_matter_whatever_finite_value_they_hold(pool, monkeypatch, chosen):
    monkeypatch.setattr(ragged, "_sizes", blocks_of(16))
    q, k, v = pool
    start, length = jnp.array([[20, 20], [20, 20]]), jnp.array([[30, 30], [30, 30]])
    outside = ((np.arange(SLOTS) < 20) | (np.arange(SLOTS) >= 50))[:, None]
    run = jax.jit(functools.partial(decode_attention, implementation=chosen))
    clean, dirty = (
        run(q, np.where(outside, a, k), np.where(outside, b, v), start, length)
        for a, b in ((k, v), (np.float32(1e4), np.float32(1e30)))
    )
    check(dirty, clean)


@either
def test_peaked_attention_over_several_chunks_stays_finite_and_right(pool, monkeypatch, chosen):
    monkeypatch.setattr(ragged, "_sizes", blocks_of(16))
    q, k, v = pool
    start, length = jnp.zeros((2, 2), jnp.int32), jnp.full((2, 2), SLOTS)
    out, lse = attend(500 * q, k, v, start, length, implementation=chosen)
    heads = np.repeat(k, 3, axis=1)
    best = np.argmax(np.einsum("bnh,bnph->bnp", q, heads), axis=-1)
    want = np.take_along_axis(np.repeat(v, 3, axis=1), best[..., None, None], axis=2)[:, :, 0]
    # The reference subtracts the log of the denominator, which is in the thousands: float32 has steps of 5e-4 there.
    np.testing.assert_allclose(out, want, rtol=1e-3 if chosen == "reference" else 1e-4, atol=1e-4)
    assert np.isfinite(lse).all()


@either
def test_bfloat16_pool_gives_a_float32_answer(pool, chosen):
    q, k, v = (x.astype(jnp.bfloat16) for x in pool)
    start, length = jnp.zeros((2, 2), jnp.int32), jnp.full((2, 2), 40)
    got, _ = attend(q, k, v, start, length, implementation=chosen)
    want, _ = expected(q, k, v, start, length)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=0.03)


def test_bfloat16_with_wide_heads_in_groups():
    """XLA for a CPU cannot multiply every order of axes in bfloat16."""
    random = np.random.default_rng(1)
    q, k, v = (jnp.array(random.standard_normal(shape), jnp.bfloat16) for shape in ((1, 6, 64), *[(1, 2, 200, 64)] * 2))
    segment = jnp.zeros((1, 2), jnp.int32), jnp.full((1, 2), 200)
    wanted = attend(q, k, v, *segment, implementation="reference")
    for got, want in zip(attend(q, k, v, *segment), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=0.03)


@pytest.mark.parametrize(
    ("block", "most"), [(16, None), (128, None), (128, 50)], ids=["blocks", "one block", "one block of a few slots"]
)
@pytest.mark.parametrize(
    ("start", "length"),
    [
        ([[0, 0], [20, 20]], [[30, 30], [50, 50]]),
        ([[0, 16], [20, 20]], [[30, 20], [50, 50]]),
        ([[0, 60], [70, 0]], [[5, 15], [5, 5]]),  # far apart
        ([[0, 0], [0, 70]], [[30, 30], [0, 5]]),  # an empty segment lies nowhere
        ([[9, 40], [0, 70]], [[0, 0], [0, 0]]),
    ],
)
def test_heads_that_are_read_together_may_have_segments_anywhere(pool, monkeypatch, block, most, start, length):
    monkeypatch.setattr(together, "_MOST", block)
    start, length = jnp.array(start), jnp.array(length)
    check(attend(*pool, start, length, max_length=most), expected(*pool, start, length))


@pytest.mark.parametrize("group", [1, 6, 7, 16])
def test_groups_of_every_size(pool, group):
    """A CPU multiplies the queries of a small group one by one, and those of a large one together."""
    q = jnp.array(np.random.default_rng(3).standard_normal((BATCH, KV_HEADS * group, HEAD_DIM)), jnp.float32)
    start, length = jnp.array([[3, 7], [21, 0]]), jnp.array([[40, 33], [2, 0]])
    check(whole(q, *pool[1:], start, length), expected(q, *pool[1:], start, length))


def test_combine_of_two_parts_is_attention_over_both(pool):
    one = jnp.array([[0, 0], [0, 10]]), jnp.array([[20, 5], [0, 1]])
    two = jnp.array([[20, 5], [0, 11]]), jnp.array([[10, 0], [9, 60]])
    got = combine(whole(*pool, *one), whole(*pool, *two))
    check(got, expected(*pool, [[0, 0], [0, 10]], [[30, 5], [9, 61]]))


def test_combine_with_an_empty_side_is_the_other_side(pool):
    start = jnp.zeros((2, 2), jnp.int32)
    part = whole(*pool, start, jnp.full((2, 2), 33))
    empty = whole(*pool, start, start)
    for got in (combine(part, empty), combine(empty, part)):
        check(got, part)


def test_combine_of_two_empty_sides_is_zero(pool):
    start = jnp.zeros((2, 2), jnp.int32)
    empty = whole(*pool, start, start)
    check(combine(empty, empty), empty)
    out, total = combine(empty, empty, softmax_n=3.0)
    check((out, total), (np.zeros(out.shape), np.full(total.shape, math.log(3))))


@pytest.fixture(scope="module")
def n_softmax(golden):
    g = golden("n_softmax_decode")
    q, k, v = (jnp.array(g[name])[None] for name in "qkv")
    return g, (q[:, :, 0], k, v)


@either
def test_golden_outputs_with_n_in_the_denominator(n_softmax, monkeypatch, chosen):
    monkeypatch.setattr(ragged, "_sizes", blocks_of(16))
    g, (q, k, v) = n_softmax
    heads, slots = k.shape[1:3]
    start, length = jnp.zeros((1, heads), jnp.int32), jnp.full((1, heads), slots)
    run = functools.partial(decode_attention, start=start, length=length, return_mass=True, implementation=chosen)
    n = float(g["softmax_n_values"][0])  # joins what an implementation returns: the test of two parts takes every n
    for valid, name in ((None, "paper_output"), (jnp.array(g["valid"])[None], "paper_output_with_valid_mask")):
        out, lse, mass = jax.jit(functools.partial(run, softmax_n=n))(q, k, v, valid=valid)
        np.testing.assert_allclose(out[0], g[name][0], rtol=1e-5, atol=1e-6)
        received = np.einsum("bnp,bnph->bnh", mass, np.repeat(v, q.shape[1] // heads, axis=1))
        np.testing.assert_allclose(received[0], g[name][0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.sum(mass, axis=-1), 1 - n * np.exp(-lse), rtol=1e-5)


def test_golden_outputs_of_one_part_and_of_two_with_n_in_their_joint_denominator(n_softmax):
    g, (q, k, v) = n_softmax
    heads, slots = k.shape[1:3]
    start = jnp.zeros((1, heads), jnp.int32)
    for i, n in enumerate(g["softmax_n_values"].tolist()):
        one, lse = whole(q, k, v, start, start + slots, softmax_n=n)
        np.testing.assert_allclose(one[0], g["paper_output"][i], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one[0], g["as_released_output"][i], rtol=1e-4, atol=2e-5)
        for cut in (0, slots // 3, slots):
            first, second = whole(q, k, v, start, start + cut), whole(q, k, v, start + cut, start + slots - cut)
            out, total = combine(first, second, softmax_n=n)
            np.testing.assert_allclose(out[0], g["paper_output"][i], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(total, lse, rtol=1e-5)


@pytest.mark.parametrize("scale", [500.0, 1e-3])
def test_n_next_to_very_large_and_very_small_denominators(pool, scale):
    q, k, v = pool
    start, length = jnp.zeros((2, 2), jnp.int32), jnp.array([[75, 1], [0, 30]])
    plain, lse, mass = whole(scale * q, k, v, start, length, return_mass=True)
    out, total, shares = whole(scale * q, k, v, start, length, softmax_n=2.0, return_mass=True)
    want = np.logaddexp(np.float64(lse), math.log(2))
    np.testing.assert_allclose(total, want, rtol=1e-5)
    weight = np.exp(np.float64(lse) - want)[..., None]
    # A log-sum-exp of hundreds is known to an ulp of its own, which its exponential multiplies.
    for got, before in ((out, plain), (shares, mass)):
        np.testing.assert_allclose(got, before * weight, rtol=1e-4, atol=1e-6)
    assert not np.asarray(out[1, :3]).any() and np.isfinite(out).all()  # the empty segment


def test_golden_attention_of_the_last_rows_and_their_log_sum_exp(golden):
    for name in golden.names("column_sums_*"):
        g = golden(name)
        k, v = (jnp.array(g[part])[None] for part in "kv")
        heads, length = k.shape[1:3]
        for row in range(1, g["paper_attention_output"].shape[1] + 1):
            seen = jnp.full((1, heads), length - row + 1)
            out, lse = whole(jnp.array(g["q"][None, :, -row]), k, v, jnp.zeros_like(seen), seen)
            np.testing.assert_allclose(out[0], g["paper_attention_output"][:, -row], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(lse[0], g["paper_log_sum_exp"][:, -row], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("k", (BATCH, 4, SLOTS, HEAD_DIM)), ("start", (BATCH, HEADS)), ("length", (BATCH, 1))],
)
def test_what_does_not_fit_is_refused(pool, name, shape):
    arrays = dict(zip("qkv", pool, strict=True))
    arrays["start"] = arrays["length"] = jnp.ones((BATCH, KV_HEADS), jnp.int32)
    arrays[name] = jnp.ones(shape, arrays[name].dtype)
    if name == "k":
        arrays["v"] = arrays["k"]
    with pytest.raises(Exception, match="decode_attention"):
        decode_attention(**arrays)


def test_a_loop_over_steps_converts_no_whole_pool():
    """XLA on a CPU computes bfloat16 in float32, and moves the conversion of what does not change out of a loop."""
    slots = 4096
    q, k, v = (jnp.ones((1, heads, n, 64), "bfloat16") for heads, n in ((4, 1), (2, slots), (2, slots)))
    start, length = jnp.zeros((1, 2), int), jnp.full((1, 2), 700)

    def steps(q, k, v):
        def one(q, _):
            return decode_attention(q, k, v, start, length, implementation="xla")[0].astype(q.dtype), None

        return jax.lax.scan(one, q[:, :, 0], None, length=3)[0]

    text = jax.jit(steps).lower(q, k, v).compile().as_text()
    assert "bf16[1,2,4096,64]" in text
    assert not re.findall(r"= f32\[[\d,]*4096,64\]\S* (?:fusion|get-tuple-element)\(.*", text)
