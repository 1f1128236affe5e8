"""prefill_attention against float64 numpy: in one block, in many, and by splash attention in Pallas' interpreter."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import prefill_attention
from pallas_kernels.prefill_attention import cudnn, mosaic_tpu, xla
from pallas_kernels.prefill_attention.reference import PrefillArguments

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def attend(q, k, v, *, valid, place=None, until=None, row_weight=None, **options):
    """In one program, made anew each time: tests change what is chosen while it is traced."""
    run = jax.jit(functools.partial(prefill_attention, **options))
    return run(q, k, v, valid=valid, place=place, until=until, row_weight=row_weight)


def arrays(seed, length, head_dim=HEAD_DIM, batch=2, dtype=jnp.float32):
    """A generator of random numbers, and q, k and v of it."""
    random = np.random.default_rng(seed)
    shapes = [(batch, length, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return random, *(random.standard_normal(shape).astype(dtype) for shape in shapes)


def expected(q, k, v, valid, causal, near=True):
    """Attention [B, T, N, H], its log-sum-exps [B, N, T] and probabilities [B, N, T, S].

    Keys must be valid, and `near` [B, T, S] the query. The log-sum-exp of a token that does not exist is +inf.
    """
    q, k, v = (np.repeat(np.float64(x), q.shape[2] // x.shape[2], axis=2) for x in (q, k, v))
    allowed = valid[:, None, :] & (np.tri(q.shape[1], dtype=bool) | (not causal)) & near
    e = np.exp(np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])) * allowed[:, None]
    total = e.sum(axis=-1)
    p = e / np.maximum(total, 1e-300)[..., None]
    with np.errstate(divide="ignore"):
        return np.einsum("bnts,bsnh->btnh", p, v), np.where(valid[:, None], np.log(total), np.inf), p


@pytest.fixture(params=["one block", "blocks of 16", "head by head", "head by head, blocks of 16"])
def cut(request, monkeypatch):
    """The work is small: say that it is not."""
    if "head" in request.param:
        monkeypatch.setattr(xla, "_SMALL", 0)
    if "16" in request.param:
        monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", dict.fromkeys(xla._BLOCK_ELEMENTS, 0))


@pytest.mark.default("head by head, blocks of 16")
def test_gradients_are_those_of_plain_attention(cut):
    length = 40
    _, *qkv = arrays(2, length, batch=1)
    valid = np.arange(length)[None] >= 7

    def plain(q, k, v):
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(HEAD_DIM)
        logits = jnp.where(jnp.tri(length, dtype=bool) & valid[:, None, None], logits, -1e30)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)

    def loss(attend):
        return lambda *x: jnp.sum(jnp.sin(attend(*x)) * valid[..., None, None])

    got = jax.jit(jax.grad(loss(lambda *x: prefill_attention(*x, valid=valid)), argnums=(0, 1, 2)))(*qkv)
    want = jax.jit(jax.grad(loss(plain), argnums=(0, 1, 2)))(*qkv)
    for g, w in zip(got, want, strict=True):
        assert np.isfinite(g).all()
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.default("False")
@pytest.mark.parametrize("causal", [True, False])
def test_splash_attention(monkeypatch, causal):
    """Two blocks of 128, the second part padding; heads of 80 channels, rows padded on either side."""
    monkeypatch.setattr(mosaic_tpu, "_BLOCK", 128)
    length = 200
    _, q, k, v = arrays(3, length, 80)
    place = np.arange(length)
    valid = np.stack([place >= 43, place < 151])
    got = attend(q, k, v, valid=valid, causal=causal, implementation="mosaic_tpu:interpret")
    assert got.shape == q.shape and got.dtype == jnp.float32 and np.isfinite(got).all()
    np.testing.assert_allclose(np.asarray(got)[valid], expected(q, k, v, valid, causal)[0][valid], atol=2e-5)


PLACE = np.arange(100)
PADDED = np.stack([PLACE >= 37, PLACE < 71, (PLACE > 5) & (PLACE != 40), PLACE < 0])  # left, right, a hole, nothing


@pytest.mark.default("one block-cudnn", "blocks of 16-xla")
@pytest.mark.parametrize(
    ("name", "causal", "dtype"),
    [("cudnn:interpret", True, jnp.bfloat16), ("cudnn:interpret", False, jnp.float16), ("xla", True, jnp.float32),
     ("reference", False, jnp.float32)],
)  # fmt: skip
def test_padding_anywhere_and_log_sum_exps(cut, name, causal, dtype):
    _, q, k, v = arrays(4, len(PLACE), 16, len(PADDED), dtype)
    out, lse, _ = attend(q, k, v, valid=PADDED, causal=causal, return_lse=True, implementation=name)
    assert out.dtype == dtype and lse.dtype == jnp.float32 and np.isfinite(out).all()
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    want, sums, _ = expected(q, k, v, PADDED, causal)
    np.testing.assert_allclose(np.float64(out)[PADDED], want[PADDED], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-5)
    alone = attend(q, k, v, valid=PADDED, causal=causal, implementation=name)
    np.testing.assert_allclose(np.float64(alone), np.float64(out), rtol=tolerance, atol=tolerance)


@pytest.mark.default("head by head, blocks of 16-xla-True")
@pytest.mark.parametrize(("name", "causal"), [("xla", True), ("xla", False)])
def test_what_each_key_receives_is_measured_in_passing(cut, name, causal):
    """Sums, squares, entropies and counts for weights of the rows; among padding, which receives nothing."""
    random, q, k, v = arrays(5, len(PLACE), 16, len(PADDED))
    weight = (random.random((len(PADDED), 4, PADDED.shape[1])) * PADDED[:, None]).astype(np.float32)
    statistics = (("sum", 0.0), ("square", 0.0), ("entropy", 0.0), ("count", 0.2))
    part = attend(q, k, v, valid=PADDED, row_weight=weight, causal=causal, statistics=statistics, implementation=name)
    *_, p = expected(q, k, v, PADDED, causal)
    count = (p > 0) & (p >= 0.2 * p.max(axis=-1, keepdims=True))
    entropy = -p * np.log(np.where(p > 0, p, 1))
    want = [np.einsum("bt,bnts->bns", weight[:, r], x) for r, x in enumerate((p, p**2, entropy, count))]
    np.testing.assert_allclose(part.mass, np.stack(want, axis=1), rtol=1e-4, atol=1e-5)
    alone = attend(q, k, v, valid=PADDED, causal=causal, implementation=name)
    np.testing.assert_allclose(part.out, alone, rtol=1e-6, atol=1e-6)
    assert part.lse is None


@pytest.mark.default("blocks of 16-xla-False-20", "blocks of 16-xla-True-150",
                     "one block-mosaic_tpu:interpret-False-20", "one block-cudnn:interpret-False-20")  # fmt: skip
@pytest.mark.ci("blocks of 16", "one block-mosaic_tpu:interpret-False-20", "one block-cudnn:interpret-False-20")
@pytest.mark.parametrize("window", [1, 20, 150])
@pytest.mark.parametrize(
    ("name", "placed"),
    [("xla", False), ("xla", True), ("mosaic_tpu:interpret", False), ("cudnn:interpret", False)],
)
def test_a_window_before_each_query(cut, name, window, placed):
    """`placed`: tokens have been dropped, so that neighbours are up to four places apart."""
    length, dtype = 200, jnp.bfloat16 if "cudnn" in name else jnp.float32
    random, q, k, v = arrays(5, length, dtype=dtype)
    index = np.arange(length)
    valid = np.stack([index >= 43, index < 151])
    place = np.cumsum(random.integers(1, 5, (2, length)), axis=1).astype(np.int32) if placed else None
    has_lse = "mosaic" not in name
    found = attend(q, k, v, valid=valid, place=place, window=window, return_lse=has_lse, implementation=name)
    out, lse, _ = found if has_lse else (found, None, None)
    places = index[None] if place is None else place
    near = places[:, :, None] - places[:, None] < window
    want, sums, _ = expected(q, k, v, valid, True, near)
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(np.float64(out)[valid], want[valid], atol=tolerance, rtol=tolerance)
    if has_lse:
        np.testing.assert_allclose(lse, sums, rtol=1e-4, atol=1e-4)


@pytest.mark.default("blocks of 16-20-xla-True", "head by head-None-xla-False", "one block-20-reference-False")
@pytest.mark.ci("blocks of 16", "head by head-None-xla-False", "one block-20-reference-False")
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("name", ["xla", "reference"])
@pytest.mark.parametrize("window", [None, 20, 150])
def test_images_attend_in_both_directions(cut, name, window, placed):
    """Images of 1 to 41 tokens, one of them longer than a block and the window, and one at the end of a row."""
    length, longest = 200, 41
    random, q, k, v = arrays(6, length)
    index = np.arange(length)
    valid = np.stack([index >= 43, index < 151])
    until = np.tile(index, (2, 1)).astype(np.int32)
    for row, first, count in ((0, 45, longest), (0, 90, 7), (0, 193, 7), (1, 0, 1), (1, 30, 30), (1, 60, 20)):
        until[row, first : first + count] = first + count - 1
    place = np.cumsum(random.integers(1, 5, (2, length)), axis=1).astype(np.int32) if placed and window else None
    places = index[None] if place is None else place
    near = places[:, :, None] - places[:, None] < (length if window is None else window)
    allowed = near & (index <= until[:, :, None])
    out, lse, _ = attend(q, k, v, valid=valid, place=place, until=until, ahead=longest - 1, window=window,
                      return_lse=True, implementation=name)  # fmt: skip
    want, sums, _ = expected(q, k, v, valid, False, allowed)
    np.testing.assert_allclose(np.asarray(out)[valid], want[valid], atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(lse, sums, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", [cudnn, mosaic_tpu])
def test_fused_kernels_leave_images_that_attend_in_both_directions_to_xla(kernel):
    x = np.zeros((1, 128, 2, 64), jnp.bfloat16)
    args = PrefillArguments(x, x, x, None, True, False)
    assert kernel.unsupported(args) is None
    until = np.full((1, 128), 127)
    assert "both directions" in kernel.unsupported(dataclasses.replace(args, until=until, ahead=127))
    with pytest.raises(ValueError, match="both directions"):
        prefill_attention(x, x, x, until=until, ahead=127, implementation="mosaic_tpu:interpret")
    with pytest.raises(ValueError, match="attention causal"):
        prefill_attention(x, x, x, until=until, ahead=127, causal=False)


def test_what_cudnn_cannot_take_is_said():
    x = np.zeros((1, 100, 2, 64), jnp.bfloat16)
    wide = np.zeros((1, 100, 2, 512), jnp.float16)
    said = [
        cudnn.unsupported(PrefillArguments(y, y, y, None, True, False))
        for y in (x, x[:, :63], x[..., :60], wide, x.astype(jnp.float32))
    ]
    assert said[0] is None and "63 tokens" in said[1] and "60 channels" in said[2]
    assert "512 channels" in said[3] and "not all bfloat16" in said[4]


def test_what_does_not_fit_is_refused():
    x = np.zeros((2, 10, 4, 8), np.float32)
    with pytest.raises(ValueError, match=r"prefill_attention: q .* do not fit"):
        prefill_attention(x, x[:, :, :3], x[:, :, :3])
    with pytest.raises(Exception, match="valid"):  # ours, or the type checker's where the tests have it
        prefill_attention(x, x, x, valid=np.ones((2, 9), bool))
    with pytest.raises(ValueError, match="must be"):
        prefill_attention(x, x, x, row_weight=np.ones((2, 1, 9), np.float32), statistics=(("sum", 0.0),))
    with pytest.raises(ValueError, match="mass"):
        weight = np.ones((x.shape[0], 1, x.shape[1]), np.float32)
        prefill_attention(x, x, x, row_weight=weight, statistics=(("sum", 0.0),), implementation="cudnn:interpret")
    with pytest.raises(ValueError, match="10 tokens do not fill a block"):
        prefill_attention(x, x, x, implementation="mosaic_tpu:interpret")


def test_reference_of_entropy():
    """One query head; all keys are equal, so that token t has entropy log(t + 1), equally from each of its keys."""
    q = k = v = jnp.ones((1, 5, 1, 2))
    got = jax.jit(functools.partial(prefill_attention, implementation="reference", statistics=(("entropy", 0.0),)))(
        q, k, v, row_weight=jnp.ones((1, 1, 5))
    )
    each = np.log(np.arange(1, 6)) / np.arange(1, 6)
    np.testing.assert_allclose(got.mass[0, 0, 0], np.cumsum(each[::-1])[::-1], rtol=1e-5)
