"""The TPU kernels in a simulated TPU, on the watch for races, against float64 numpy.

Tiny, for the simulator is slow; the shapes are those at which these kernels could go wrong.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import attention_mass, attention_mass_rows, core_attention, decode_attention
from pallas_kernels.attention_mass import mosaic_tpu as mass_kernel
from pallas_kernels.decode_attention import mosaic_tpu as decode_kernel
from pallas_kernels.decode_attention import tpu_row as decode_sizes

NAME = "mosaic_tpu:interpret"


@pytest.fixture(autouse=True)
def watch():
    """The simulator notes races, it does not raise."""
    yield
    simulator = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    assert simulator.races is None or not simulator.races.races_found


def pool(heads, kv_heads, head_dim, slots, batch, dtype=jnp.float32, seed=0):
    random = np.random.default_rng(seed)
    q = 2 * random.standard_normal((batch, heads, head_dim))
    k, v = random.standard_normal((2, batch, kv_heads, slots, head_dim))
    return tuple(x.astype(dtype) for x in (q, k, v))


def expected(*arrays):
    """Attention, log-sum-exp and mass in float64; the last array [B, K, M] says what takes part, from the start."""
    return exact.segments(*arrays, bound=arrays[-1].shape[-1])


def check(got, want, dtype):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 if dtype == jnp.float32 else 0.01)


SEGMENTS = {  # slots, bound on a segment, start, length
    "whole blocks and a part": (288, 256, [[16, 16], [32, 160]], [[200, 256], [256, 128]]),
    "empty rows between others": (288, 200, [[0, 0], [7, 7], [0, 0]], [[0, 0], [150, 1], [0, 0]]),
    "heads that begin apart, off tiles": (288, 200, [[3, 88], [16, 7]], [[200, 17], [0, 130]]),
    "a pool smaller than a block": (48, 48, [[0, 16], [33, 20]], [[48, 1], [15, 28]]),
    "a tail of no whole tile": (21, 21, [[0, 0], [0, 0]], [[21, 21], [1, 0]]),
    "a tail with its slots in the lanes": (100, 100, [[0, 0], [0, 0]], [[100, 99], [1, 0]]),
}


@pytest.mark.parametrize(
    ("case", "kv_heads", "head_dim", "dtype", "masked", "two_cores"),
    [
        ("whole blocks and a part", 1, 64, jnp.float32, True, True),
        ("empty rows between others", 2, 64, jnp.float32, False, True),
        ("heads that begin apart, off tiles", 2, 80, jnp.float32, True, False),
        ("a pool smaller than a block", 1, 96, jnp.bfloat16, False, False),
        ("a tail of no whole tile", 2, 64, jnp.float32, True, False),
        ("a tail with its slots in the lanes", 2, 64, jnp.bfloat16, True, False),
    ],
)
@pytest.mark.full
def test_segments_masked_with_mass_or_neither(monkeypatch, case, kv_heads, head_dim, dtype, masked, two_cores):
    # Blocks of one chunk, so that a segment has several.
    monkeypatch.setattr(decode_sizes, "_BUFFER", 1024)
    monkeypatch.setattr(decode_kernel, "cores", lambda: 1 + two_cores)
    slots, most, start, length = SEGMENTS[case]
    start, length = ([row[:kv_heads] for row in x] for x in (start, length))
    arrays = pool(4, kv_heads, head_dim, slots, len(start), dtype)
    valid = np.ones((len(start), kv_heads, most), bool)
    options = {"max_length": most, "implementation": NAME}
    if masked:
        valid = np.random.default_rng(1).random(valid.shape) < 0.6
        valid[0, :, :128] = most < 128  # a block without a valid slot
        options |= {"valid": valid, "return_mass": True}
    got = decode_attention(*arrays, np.array(start), np.array(length), **options)
    check(got, expected(*arrays, start, length, valid)[: len(got)], dtype)


def test_one_slot_at_the_end_of_a_pool(monkeypatch):
    """The segments fit one block of 128 slots in the lanes, which is not the first."""
    monkeypatch.setattr(decode_sizes, "_BUFFER", 1024)
    arrays, start, length = pool(16, 16, 64, 288, 1), np.full((1, 16), 280), np.ones((1, 16), int)
    options = {"max_length": 1, "return_mass": True, "implementation": NAME}
    got = decode_attention(*arrays, np.array(start), np.array(length), **options)
    check(got, expected(*arrays, start, length, np.ones((1, 16, 1), bool)), jnp.float32)


@pytest.mark.full
@pytest.mark.parametrize("two_cores", [True])
def test_core_rows_and_the_text_behind_them(monkeypatch, two_cores):
    monkeypatch.setattr(decode_kernel, "cores", lambda: 1 + two_cores)
    monkeypatch.setattr(decode_sizes, "_BUFFER", 1024)
    q, k, v = pool(4, 2, 64, 416, 2)
    start, length, text = [[16, 0], [0, 32]], [[400, 390], [20, 384]], [[390, 380], [0, 384]]
    rows = np.full((2, 6), -1)  # what is beyond the count may be anything
    rows[0], rows[1, :3] = [1, 2, 50, 300, 310, 379], [0, 17, 260]  # none in one of the blocks
    count = np.array([6, 3])
    place = np.arange(400)
    core = np.stack([np.isin(place, rows[b, : count[b]]) for b in range(2)])
    taking_part = core[:, None] | (place >= np.array(text)[..., None])
    got = core_attention(
        q, k, v, *(jnp.array(x) for x in (start, length, rows, count, text)), max_length=400, return_mass=True,
        implementation=NAME,
    )  # fmt: skip
    check(got, expected(q, k, v, start, length, taking_part), jnp.float32)


@pytest.fixture
def simulated_copies(monkeypatch):
    """The shape and bytes of every copy between HBM and VMEM that a simulated TPU makes."""
    simulator, copies = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call"), []
    execute = simulator.DMA.execute_read

    def read(copy):
        fresh = copy.data is None  # it is called again when the copy is awaited
        execute(copy)
        if fresh:
            copies.append((copy.data.shape, copy.data.nbytes))

    monkeypatch.setattr(simulator.DMA, "execute_read", read)
    return copies


@pytest.mark.full
@pytest.mark.parametrize(("slots", "stored"), [(640, 288)])  # of one image of LLaVA-1.5
def test_bytes_of_a_core_whose_entries_share_tiles(simulated_copies, slots, stored):
    """A tenth of the image, as `group_core` leaves it: scattered over as few tiles as hold it. The mask is included."""
    random = np.random.default_rng(4)
    q, k, v = pool(8, 4, 128, slots, 1, jnp.bfloat16)
    core = 2 * stored // 10
    offsets = np.sort(random.permutation(-(-core // 16) * 16)[:core])
    text, length = stored, stored + 5
    segment = (jnp.full((1, 4), x) for x in (0, length))
    got = core_attention(
        q, k, v, *segment, jnp.array(offsets[None]), jnp.array([core]), jnp.full((1, 4), text), max_length=stored + 32,
        implementation=NAME,
    )  # fmt: skip
    place = np.arange(length)
    taking_part = np.broadcast_to(np.isin(place, offsets) | (place >= text), (1, 4, length))
    check(got, expected(q, k, v, [[0] * 4], [[length] * 4], taking_part)[:2], jnp.bfloat16)
    of_slot = 2 * 4 * 128 * 2  # keys and values, heads, channels, bytes
    tile_of_text = 16 * of_slot
    assert sum(size for _, size in simulated_copies) - tile_of_text <= 1.2 * core * of_slot


@pytest.mark.full
@pytest.mark.ci("square", "entropy")
@pytest.mark.parametrize(
    ("place", "causal", "softmax_n", "statistic", "dtype"),
    [
        (None, True, 0.0, "sum", jnp.float32),
        (None, False, 4.0, "square", jnp.bfloat16),
        (None, True, 1.0, "entropy", jnp.float32),
        ([299, 5, 20, 0, 21, 5, 9, 150], True, 1.0, "count", jnp.float32),
    ],
)
def test_masses(monkeypatch, place, causal, softmax_n, statistic, dtype):
    for name in ("_ROWS", "_KEYS"):  # three blocks of each
        monkeypatch.setattr(mass_kernel, name, 128)
    random = np.random.default_rng(2)
    keys, rows = 300, 300 if place is None else len(place)
    q = jnp.array(2 * random.standard_normal((4, rows, 64)), dtype)
    k = jnp.array(random.standard_normal((2, keys, 64)), dtype)
    row_weight, key_weight = (random.random((2, n)).astype(np.float32) for n in (rows, keys))
    mask = random.random(keys) < 0.8
    mask[:3] = False  # rows 0 to 2 see nothing
    places = np.arange(rows) if place is None else np.array(place)
    p, allowed = exact.probabilities(q, k, mask, places, causal=causal, softmax_n=softmax_n)
    options = {
        "key_mask": jnp.array(mask), "row_place": None if place is None else jnp.array(place), "causal": causal,
        "softmax_n": softmax_n, "implementation": NAME,
    }  # fmt: skip
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype == jnp.float32 else {"rtol": 0.01, "atol": 0.01}
    got = attention_mass_rows(q, k, key_weight=jnp.array(key_weight), **options)
    np.testing.assert_allclose(got, np.einsum("rs,nts->rnt", key_weight, p), **tolerance)
    share = {"sum": p, "square": p**2, "count": allowed & (p >= 0.1 * p.max(axis=-1, keepdims=True))}
    share = (share | {"entropy": -p * np.log(np.where(p > 0, p, 1))})[statistic]
    got = attention_mass(q, k, row_weight=jnp.array(row_weight), statistic=statistic, threshold=0.1, **options)
    np.testing.assert_allclose(got, np.einsum("rt,nts->rns", row_weight, np.float64(share)), **tolerance)


@pytest.mark.parametrize(
    ("slots", "dtype", "words"),
    [(200, jnp.float32, "200 slots is not a multiple of 16"), (64, jnp.float16, "not both bfloat16 or both float32")],
)
def test_a_pool_that_it_cannot_take_is_refused_by_name_and_run_otherwise(slots, dtype, words):
    arrays, segment = pool(2, 1, 128, slots, 1, dtype), (np.zeros((1, 1), np.int32), np.full((1, 1), 20))
    with pytest.raises(ValueError, match=f"decode_attention: implementation '{NAME}' cannot run this: .*{words}"):
        decode_attention(*arrays, *segment, implementation=NAME)
    device = jax.sharding.AbstractDevice(device_kind="TPU v4", num_cores=2, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        jaxpr = jax.make_jaxpr(decode_attention)(*arrays, *segment)
    assert "pallas_call" not in str(jaxpr)
