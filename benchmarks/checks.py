"""Compares every kernel on this device with float64 on the host.

Cases have empty segments, segments of one slot, of an odd length and of the whole pool. Slots that must not be read
hold large numbers, so that reading one causes a large error. Differences are relative to the largest number of each
head, so that an error in a head with small numbers is noticed too.

Axes: B batch · T query rows · N query heads · K key heads · G = N/K · P pool slots · H head dim.
"""

import dataclasses
import itertools
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import exact

THRESHOLDS = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-5}
_IN_XLA: dict[str | None, str] = {"write_slots": "xla", "swap_slots": "xla"}
# by platform and op (None: all other ops); on a CPU the kernels of a GPU, interpreted
KERNELS: dict[str, dict[str | None, str]] = {
    "gpu": {"prefill_attention": "cudnn", **_IN_XLA, None: "triton"},
    "tpu": {None: "mosaic_tpu"},
    "cpu": {"prefill_attention": "cudnn:interpret", **_IN_XLA, None: "triton:interpret"},
}
POISON = 1e4  # in slots that must not be read; finite, as free slots of a cache are


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one op."""

    op: str
    head_dim: int = 128
    groups: int = 7
    dtype: str = "bfloat16"
    slots: int = 2048  # P, or T = S of a prompt
    batch: int = 2
    kv_heads: int = 2
    softmax_n: float = 0.0
    full: bool = False  # decoding: mask, and probabilities returned; mass: gathered rows; prefill: not causal
    statistic: str = "sum"
    pool_bytes: int = 0  # decoding: least bytes of the keys; the segments are then at the end of the pool

    @property
    def name(self) -> str:
        """The op, its shape and dtype, and all other fields that are not the defaults."""
        shown = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)[1:]
            if field.name in ("head_dim", "groups", "dtype") or getattr(self, field.name) != field.default
        )
        return " ".join([self.op, *shown])


def cases() -> Iterator[Case]:
    """All cases, the most important first: H = 64, 80, 96, 128, 256 and G = 1, 7, 8 for every op."""
    slots, decoding = 2048, ("decode_attention", "core_attention")
    yield Case("decode_attention")
    yield Case("core_attention", full=True)
    yield Case("prefill_attention", slots=slots // 2)
    yield Case("attention_mass", slots=slots // 2)
    yield Case("attention_mass_rows", slots=slots // 2, full=True)
    yield Case("write_slots", head_dim=64)
    yield Case("swap_slots")
    yield Case("decode_attention", batch=1, kv_heads=4, pool_bytes=5 * 2**30)  # exceeds 32-bit offsets
    yield Case("decode_attention", slots=slots // 4, batch=64, kv_heads=8)  # as many programs as heads: no split
    shapes = [(h, g) for h in (64, 80, 96, 128, 256) for g in (1, 7, 8)]
    for i, (head_dim, groups) in enumerate(shapes):
        dtype = ("float32", "bfloat16", "bfloat16", "float32", "float16")[i % 5]
        for op in decoding:
            yield Case(op, head_dim, groups, dtype, slots, softmax_n=float(i % 3), full=i % 2 == (op == decoding[0]))
        statistic = ("sum", "square", "count", "entropy")[i % 4]
        yield Case("attention_mass", head_dim, groups, dtype, slots // 2, full=i % 2 == 0, statistic=statistic)
        yield Case("attention_mass_rows", head_dim, groups, dtype, slots // 2, softmax_n=float(i % 2), full=i % 2 == 1)
        if dtype != "float32":
            yield Case("prefill_attention", head_dim, groups, dtype, slots // 2, full=i % 2 == 0)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A compiled case."""

    case: Case
    implementation: str
    compiled: Callable[..., Any]
    arguments: tuple[Any, ...]
    compare: Callable[[Any], float]  # from the op's result to the largest relative difference
    prepare_seconds: float

    def run(self) -> dict[str, Any]:
        """Runs it twice; reports whether the bits are equal, and the largest difference from float64."""
        begin = time.perf_counter()
        first, second = (jax.tree.map(np.asarray, self.compiled(*self.arguments)) for _ in range(2))
        leaves = jax.tree.leaves(first), jax.tree.leaves(second)
        same = all(np.array_equal(*pair, equal_nan=True) for pair in zip(*leaves, strict=True))
        error = self.compare(first)
        threshold = THRESHOLDS[self.case.dtype]
        return {
            "case": self.case.name,
            "implementation": self.implementation,
            "passed": bool(error <= threshold and same),
            "largest_error": float(f"{error:.3g}"),
            "threshold": threshold,
            "equal_bits": same,
            "seconds": round(self.prepare_seconds + time.perf_counter() - begin, 2),
        }


def prepare(case: Case, platform: str) -> Prepared:
    """Makes the arrays of a case and compiles its op for a platform, "gpu", "tpu" or "cpu"."""
    begin, table = time.perf_counter(), KERNELS[platform]
    implementation = table.get(case.op, table[None])
    arguments, options, compare = _MAKERS[case.op](case, np.random.default_rng(zlib.crc32(case.name.encode())))
    op = OPS[case.op]
    values = (jax.tree.map(jnp.asarray, arguments),)
    compiled = jax.jit(lambda x: op(**x, **options, implementation=implementation)).lower(*values).compile()
    return Prepared(case, implementation, compiled, values, compare, time.perf_counter() - begin)


Made = tuple[dict[str, Any], dict[str, Any], Callable[[Any], float]]  # arrays, options and comparison for an op


def _normal(random: np.random.Generator, dtype: str, *shape: int, scale: float = 1.0) -> Any:
    return (scale * random.standard_normal(shape, np.float32)).astype(jnp.dtype(dtype))


def _decoding(case: Case, random: np.random.Generator) -> Made:
    batch, kv_heads, slots = case.batch, case.kv_heads, case.slots
    each = batch, kv_heads
    kinds = [(0, 0), (slots // 2 + 16, 1), (16, slots // 3 + 5), (0, slots)]
    start, length = np.array([kinds[i % 4] for i in range(batch * kv_heads)]).T.reshape(2, *each)
    if case.pool_bytes:
        length = np.maximum(length, slots // 5)
        start = np.minimum(start, slots - length)
    takes_part = random.random((*each, slots)) < 0.7 if case.full else None
    options: dict[str, Any] = {"softmax_n": case.softmax_n, "return_mass": case.full, "max_length": slots}
    extra: dict[str, Any] = {} if takes_part is None else {"valid": takes_part}
    taken = np.ones((*each, slots), bool) if takes_part is None else takes_part
    if case.op == "core_attention":
        text = np.minimum(slots // 2, length)  # an empty segment has no text before its list
        count = np.full(batch, slots // 8)
        rows = np.stack([np.sort(random.permutation(slots // 2)[: slots // 4]) for _ in range(batch)])
        least = text.min(axis=1)  # listed slots are before the text of every head
        count = np.array([min(n, int(np.sum(r < m))) for n, r, m in zip(count, rows, least, strict=True)])
        extra |= {"offsets": rows.astype(np.int32), "count": count.astype(np.int32), "text": text.astype(np.int32)}
        taken = taken & exact.listed(rows, count, text, length, slots)
    q = _normal(random, case.dtype, batch, kv_heads * case.groups, case.head_dim, scale=2.0)
    k, v = (_normal(random, case.dtype, batch, kv_heads, slots, case.head_dim) for _ in range(2))
    for b, head in np.ndindex(each):
        place = np.arange(slots) - start[b, head]
        inside = (place >= 0) & (place < length[b, head])
        inside[inside] = taken[b, head, place[inside]]
        k[b, head, ~inside], v[b, head, ~inside] = POISON, POISON
    want = exact.segments(q, k, v, start, length, taken, case.softmax_n, slots)

    def compare(got: Any) -> float:
        errors = [_by_head(got[0], want[0], axis=-1), _logs(got[1], want[1])]
        return max([*errors, _by_head(got[2], want[2], axis=-1)] if case.full else errors)

    if case.pool_bytes:
        k, v, shift = _in_large_pool(k, v, case.pool_bytes)
        start = start + shift
    arrays = {"q": q, "k": k, "v": v, "start": start.astype(np.int32), "length": length.astype(np.int32)}
    return arrays | extra, options, compare


def _in_large_pool(k: Any, v: Any, pool_bytes: int) -> tuple[Any, Any, int]:
    """Keys and values at the end of a pool of `pool_bytes` on the device, and their first slot there."""
    slots = -(-pool_bytes // (k.nbytes // k.shape[2]))
    shift = slots - k.shape[2]

    def place(x: Any) -> Any:
        shape = *x.shape[:2], slots, x.shape[3]
        return jax.jit(lambda x: jnp.full(shape, POISON, x.dtype).at[:, :, shift:].set(x))(jnp.asarray(x))

    return place(k), place(v), shift


def _mass(case: Case, random: np.random.Generator) -> Made:
    keys = case.slots
    places = np.sort(random.permutation(keys)[: max(2, keys // 16)]) if case.full else np.arange(keys)
    q = _normal(random, case.dtype, case.kv_heads * case.groups, len(places), case.head_dim, scale=2.0)
    k = _normal(random, case.dtype, case.kv_heads, keys, case.head_dim)
    mask = random.random(keys) < 0.8
    mask[:3] = False  # the first rows see nothing
    k[:, ~mask] = POISON
    arrays = {"q": q, "k": k, "key_mask": mask}
    if case.full:
        arrays["row_place"] = places.astype(np.int32)
    options: dict[str, Any] = {"softmax_n": case.softmax_n}
    p, allowed = exact.probabilities(q, k, mask, places, softmax_n=case.softmax_n)
    if case.op == "attention_mass_rows":
        weight = random.random((2, keys)).astype(np.float32)
        want = np.einsum("rs,nts->rnt", weight.astype(np.float64), p, optimize=True)
        return arrays | {"key_weight": weight}, options, lambda got: _by_head(got, want, axis=-1)
    weight = random.random((2, len(places))).astype(np.float32)
    arrays["row_weight"] = weight
    options |= {"statistic": case.statistic, "threshold": 0.05}

    def total(p: np.ndarray) -> np.ndarray:
        return np.einsum("rt,nts->rns", weight.astype(np.float64), p.astype(np.float64), optimize=True)

    if case.statistic == "count":
        surely, possibly = map(total, exact.counts(p, allowed, 0.05, 1e-4))
        return arrays, options, lambda got: _by_head(np.clip(got, surely, possibly), exact.wide(got), axis=-1)
    entropy = -p * np.log(np.where(p > 0, p, 1.0))
    want = total({"sum": p, "square": p**2, "entropy": entropy}[case.statistic])
    return arrays, options, lambda got: _by_head(got, want, axis=-1)


def _prefill(case: Case, random: np.random.Generator) -> Made:
    """With log-sum-exp; rows with no, left and right padding."""
    place, tokens = np.arange(case.slots), case.slots
    valid = np.stack([place >= 0, place >= tokens // 3, place < tokens // 2 + 1])
    heads = case.kv_heads * case.groups
    q, k, v = (_normal(random, case.dtype, 3, tokens, n, case.head_dim) for n in (heads, case.kv_heads, case.kv_heads))
    for x in (q, k, v):
        x[~valid] = POISON if x is not q else 1.0
    out, lse = exact.prompt(q, k, v, valid, not case.full)

    def compare(got: Any) -> float:
        attended = np.where(valid[..., None, None], exact.wide(got[0]), 0.0)
        if not np.all(np.isfinite(exact.wide(got[0]))):
            return float("inf")
        return max(_by_head(attended.swapaxes(1, 2), out.swapaxes(1, 2), axis=(-2, -1)), _logs(got[1], lse))

    arrays = {"q": q, "k": k, "v": v, "valid": valid}
    return arrays, {"causal": not case.full, "return_lse": True}, compare


def _writing(case: Case, random: np.random.Generator) -> Made:
    """One slot of each head, and for one head none."""
    each = case.batch, case.kv_heads
    x, new = (_normal(random, case.dtype, *each, *shape, case.head_dim) for shape in ((case.slots,), ()))
    slot = random.integers(0, case.slots, each).astype(np.int32)
    slot[0, 0] = case.slots
    want = exact.wide(x)
    for b, head in np.ndindex(each):
        if slot[b, head] < case.slots:
            want[b, head, slot[b, head]] = exact.wide(new[b, head])
    return {"x": x, "new": new, "slot": slot}, {}, lambda got: _by_head(got, want, axis=-1)


def _swapping(case: Case, random: np.random.Generator) -> Made:
    """Slots of both halves of the pool; one row has only one pair."""
    each, half = (case.batch, case.kv_heads), case.slots // 2
    pools = tuple(_normal(random, case.dtype, *each, case.slots, case.head_dim) for _ in range(2))
    first, second = np.sort([[random.permutation(half)[: half // 4] for _ in range(case.batch)] for _ in range(2)])
    second, count = second + half, np.full(case.batch, half // 4)
    count[0] = 1
    want = [exact.wide(x) for x in pools]
    for x, b in itertools.product(want, range(case.batch)):
        a, c = first[b, : count[b]], second[b, : count[b]]
        x[b, :, a], x[b, :, c] = x[b, :, c], x[b, :, a].copy()

    def compare(got: Any) -> float:
        return max(_by_head(x, y, axis=-1) for x, y in zip(got, want, strict=True))

    return {"pools": pools, "first": first, "second": second, "count": count}, {}, compare


def _by_head(got: Any, want: np.ndarray, axis: Any) -> float:
    """The largest difference relative to the largest number along `axis`; absolute if all numbers are 0."""
    got = exact.wide(got)
    if got.shape != want.shape or not np.all(np.isfinite(got)):
        return float("inf")
    scale = np.max(np.abs(want), axis=axis, keepdims=True)
    return float(np.max(np.abs(got - want) / np.where(scale > 0, scale, 1.0), initial=0.0))


def _logs(got: Any, want: np.ndarray) -> float:
    """The largest difference of logarithms, relative for values above 1; infinities must be equal."""
    got = exact.wide(got)
    finite = np.isfinite(want)
    if got.shape != want.shape or not np.array_equal(got[~finite], want[~finite]):
        return float("inf")
    error = np.abs(got[finite] - want[finite]) / np.maximum(np.abs(want[finite]), 1.0)
    return float(np.max(np.where(np.isfinite(error), error, np.inf), initial=0.0))


_MAKERS: dict[str, Callable[[Case, np.random.Generator], Made]] = {
    "decode_attention": _decoding,
    "core_attention": _decoding,
    "attention_mass": _mass,
    "attention_mass_rows": _mass,
    "prefill_attention": _prefill,
    "write_slots": _writing,
    "swap_slots": _swapping,
}
OPS: dict[str, Callable[..., Any]] = {name: getattr(pallas_kernels, name) for name in _MAKERS}
