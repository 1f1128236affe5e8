"""Triton kernels: right in Pallas' interpreter against float64 numpy, and lowered for CUDA on a host without a GPU.

What they compile to for an A100 and an H100: benchmarks/compile_gpu.py, which needs jax's CUDA plugin.
"""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import gpu, quantize
from pallas_kernels.attention_mass.reference import MassArguments, MassRowsArguments
from pallas_kernels.attention_mass.triton import attention_mass_rows_triton, attention_mass_triton
from pallas_kernels.decode_attention.reference import DecodeArguments, Listed
from pallas_kernels.decode_attention.triton import decode_attention_triton, unsupported

BATCH, SLOTS, MOST = 2, 190, 160  # 5 turns of 32 slots (float32) in 2 parts


def make_pool(group, head_dim, dtype=jnp.float32, kv_heads=2):
    random = np.random.default_rng(0)
    q = 2 * random.standard_normal((BATCH, group * kv_heads, head_dim))
    k, v = random.standard_normal((2, BATCH, kv_heads, SLOTS, head_dim))
    valid = random.random((BATCH, kv_heads, MOST)) < 0.7
    return [x.astype(dtype) for x in (q, k, v)], valid


def close(got, want, tolerance):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


def core_arguments(most, q, k, v, start, length, valid, *listed):
    return DecodeArguments(q, k, v, start, length, valid, most, True, Listed(*listed))


# --- mass ---------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, LENGTH = 4, 2, 100


def make_rows(head_dim=80):
    random = np.random.default_rng(2)
    q = 2 * random.standard_normal((HEADS, LENGTH, head_dim))
    k = random.standard_normal((KV_HEADS, LENGTH, head_dim))
    mask = random.random(LENGTH) < 0.8
    mask[:3] = False  # the first rows see nothing
    return *(x.astype(np.float32) for x in (q, k, random.random((3, LENGTH)))), mask


def received_mass(q, k, row_weight, key_mask, row_place, interpret=True, **options):
    args = MassArguments(q=q, k=k, row_weight=row_weight, key_mask=key_mask, row_place=row_place, **options)
    return attention_mass_triton(args, interpret=interpret)


def given_mass(q, k, key_weight, key_mask, row_place, interpret=True, **options):
    args = MassRowsArguments(q=q, k=k, key_weight=key_weight, key_mask=key_mask, row_place=row_place, **options)
    return attention_mass_rows_triton(args, interpret=interpret)


def test_mass_from_given_log_sum_exps_makes_one_pass():
    """The first pass would give other numbers: they are off by log 2 on purpose."""
    q, k, weight, mask = make_rows(head_dim=64)
    allowed = mask & np.tri(LENGTH, dtype=bool)
    logits = np.einsum("nth,nsh->nts", np.float64(q), np.repeat(np.float64(k), HEADS // KV_HEADS, axis=0)) / 8
    with np.errstate(divide="ignore"):
        lse = np.log(np.sum(np.exp(logits) * allowed, axis=-1))
    lse[:, :3], lse[:, 10] = np.inf, np.inf  # rows that see nothing, and one that does not exist
    p = exact.probabilities(q, k, mask, np.arange(LENGTH))[0] / 2
    p[:, 10] = 0
    given = (lse + math.log(2)).astype(np.float32)
    options = dict(causal=True, in_order=True, softmax_n=0.0, threshold=0.0)

    @jax.jit
    def run(q, k, weight, mask, given):
        masses = functools.partial(received_mass, q, k, weight, mask, jnp.arange(LENGTH), lse=given, **options)
        return [masses(statistic=name) for name in ("square", "entropy")]

    values = p**2, -p * np.log(np.where(p > 0, p, 1))
    close(run(q, k, weight, mask, given), [np.einsum("rt,nts->rns", np.float64(weight), x) for x in values], 1e-5)


# --- for a GPU that is not here -----------------------------------------------------------------------------------


def lowered(function, *shapes):
    """The program for CUDA, as text; jax of 0.11 and later asks for which GPU."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    devices = {"device_kind": "NVIDIA A100-SXM4-80GB", "platform": "cuda", "num_cores": None}
    if jax.__version_info__ < (0, 11):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=jax.sharding.AbstractDevice(**devices))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.default("28-4-128")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 32, 128), (28, 4, 128), (16, 2, 80)])
def test_every_kernel_lowers_for_cuda_without_a_warning(heads, kv_heads, head_dim):
    length, half = 512, jnp.bfloat16
    q, pool = ((4, heads, head_dim), half), ((4, kv_heads, length, head_dim), half)
    per_head, valid = ((4, kv_heads), jnp.int32), ((4, kv_heads, length), jnp.bool_)
    segment = q, pool, pool, per_head, per_head
    listed = ((4, 64), jnp.int32), ((4,), jnp.int32), per_head
    rows, keys = ((3, heads, length, head_dim), half), ((3, kv_heads, length, head_dim), half)
    places = (length,), jnp.int32
    batched = rows, keys, ((3, 2, length), jnp.float32), ((3, length), jnp.bool_)  # as prefill does, by vmap
    options = {"causal": True, "in_order": True, "softmax_n": 1.0, "interpret": False}
    counting, entropy = (
        functools.partial(received_mass, **options, statistic=name, threshold=0.01) for name in ("count", "entropy")
    )
    given = functools.partial(given_mass, **options)
    for function, *shapes in (
        (lambda *a: decode_attention_triton(DecodeArguments(*a, length, True)), *segment, valid),
        (lambda *a: decode_attention_triton(DecodeArguments(*a, None, length, False)), *segment),
        (lambda *a: decode_attention_triton(core_arguments(length, *a)), *segment, valid, *listed),
        (jax.vmap(counting, (0, 0, 0, 0, None)), *batched, places),
        (jax.vmap(entropy, (0, 0, 0, 0, None)), *batched, places),
        (jax.vmap(given, (0, 0, 0, 0, None)), *batched, places),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)  # jax 0.11
            assert "triton" in lowered(function, *shapes)


def test_what_a_kernel_cannot_take_is_said():
    (q, k, v), _ = make_pool(1, 64)
    segment = *np.zeros((2, BATCH, 2), np.int32), None, MOST, False
    assert unsupported(DecodeArguments(q, k, v, *segment)) is None
    packed = jax.jit(functools.partial(quantize, axis="slots"))(k, np.ones(k.shape[:3], bool))
    assert "quantised" in unsupported(DecodeArguments(q, packed, v, *segment))
    assert "float8" in unsupported(DecodeArguments(q, k.astype(jnp.float8_e4m3fn), v, *segment))


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(64, [(0, 64)]), (80, [(0, 64), (64, 16)]), (96, [(0, 64), (64, 32)]), (128, [(0, 128)]),
     (72, [(0, 64), (64, 16)]), (8, [(0, 16)]), (112, [(0, 64), (64, 32), (96, 16)])],
)  # fmt: skip
def test_a_head_is_held_as_powers_of_two(head_dim, parts):
    assert gpu.tiles(head_dim) == parts
