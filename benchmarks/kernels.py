"""Times the kernels relative to the memory's bandwidth, and compares them with jax's own operations.

    python -m benchmarks.kernels [--quick] [--batch B ...] [--out benchmarks/results/kernels.json]

On a GPU or TPU it uses the sizes of a 7B model in bfloat16 with a batch of 16, on a CPU float32 with batches of 1 and
4; `--batch` gives other sizes. All programs that compute the same are timed alternately, so that other load on the
machine is spread over all of them. Times are medians by `benchmarks.clock`: many calls in one program, each on another
copy of the data, so that dispatch and caches do not change the result. "Bytes" are the least that must move: keys and
values that take part, each once. "Share" is relative to the bandwidth of a large copy, timed in the same rounds. What
cannot run here is listed with its reason. `benchmarks.first_contact` compares every kernel with float64.

Axes: B batch · N query heads · K key heads · H head dim · T tokens of the whole prompt · P pool slots.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import clock
from pallas_kernels import attention_mass, core_attention, decode_attention, prefill_attention
from pallas_kernels import attention_mass_rows as mass_rows
from pallas_kernels.dispatch import IMPLEMENTATIONS, available, target_platform
from vlkv.files import write_json
from vlkv.tools.benching import machine

KEEPS = (0.1, 1.0)
CORE_SHARES = (0.3, 0.5, 0.7)
PAGE = 16  # slots of a page for the paged kernels
Contestants = dict[str, tuple[Any, ...]]  # by name: bytes that must move, a function, and its arguments


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements on a platform."""

    models: tuple[tuple[int, int, int], ...]  # (B, N, K)
    tokens: int  # T
    prefill: int  # T of the one row on which scores and prefill attention are compared
    copy: int  # bytes of the large copy
    dtype: Any
    rounds: int
    head_dim: int = 128
    spread: int = 2**28  # bytes of all copies of a kernel's data, more than a cache holds


QUICK = Sizes(((1, 4, 2),), 512, prefill=256, copy=2**22, dtype=jnp.float32, rounds=3, head_dim=64, spread=0)
ON_CPU = Sizes(
    ((1, 32, 32), (1, 28, 4), (4, 32, 32), (4, 28, 4)), 8192, prefill=2048, copy=2**28, dtype=jnp.float32, rounds=11
)
ON_ACCELERATOR = Sizes(((16, 32, 32), (16, 28, 4)), 8192, prefill=8192, copy=2**31, dtype=jnp.bfloat16, rounds=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a dry run with tiny shapes; the figures mean nothing")
    parser.add_argument("--batch", type=int, nargs="+", metavar="B", help="sizes of the batch (default: see above)")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    args = parser.parse_args()
    sizes = QUICK if args.quick else ON_CPU if target_platform() == "cpu" else ON_ACCELERATOR
    if args.batch:
        heads = dict.fromkeys(model[1:] for model in sizes.models)
        sizes = dataclasses.replace(sizes, models=tuple((batch, *each) for batch in args.batch for each in heads))
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.kernels", *sys.argv[1:]]),
        "machine": machine.describe(),
        "copy_bytes": sizes.copy,
        "rows": [],
    }
    parts = [partial(measure, sizes, *model) for model in sizes.models for measure in (measure_decode, measure_core)]
    for part in [*parts, partial(measure_mass, sizes)]:
        result["rows"] += part()
        if args.out:
            write_json(args.out, result)  # after each part, because a machine may be taken away before the last
    show(result)


def names(op: str) -> list[str]:
    """Implementations that run on this device, without the reference and interpreted kernels."""
    return [x for x in available(IMPLEMENTATIONS[op]) if x != "reference" and not x.endswith(":interpret")]


def attempt(run: Callable[[], Any]) -> Any:
    """The result of `run`, or its error in one line."""
    try:
        return jax.block_until_ready(run())
    except Exception as error:  # compilers raise many kinds
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# --- speed -------------------------------------------------------------------------------------------------------


def compare(sizes: Sizes, label: dict[str, Any], contestants: Contestants) -> list[dict[str, Any]]:
    """Times all contestants and a large copy alternately; `label` has the fields of every row of the result."""
    ready, rows = {}, []
    estimate = 1e-3 if label["op"] == "attention_mass" else 0.0
    repeated = partial(clock.repeated, estimate=estimate, spread_bytes=sizes.spread)
    for name, (moved, function, *arguments) in contestants.items():
        program = attempt(partial(repeated, function, *arguments, moved=moved))
        failed = program if isinstance(program, str) else attempt(program.seconds)  # the first run is not counted
        if isinstance(failed, str):
            rows.append({**label, "what": name, "error": failed})
        else:
            ready[name] = moved, program
    copied = jnp.ones(sizes.copy // 4, jnp.float32)
    calls = 4 if target_platform() == "cpu" else 64  # a program begins with one more copy, of its argument
    copy = clock.chain(lambda x, _: -x, copied, calls=calls)  # reads and writes each byte once, in place
    copy.seconds()
    times: dict[str, list[float]] = {name: [] for name in [*ready, "copy"]}
    for _ in range(sizes.rounds):
        times["copy"].append(copy.seconds())
        for name, (_, program) in ready.items():
            times[name].append(program.seconds())
    bandwidth = 2 * sizes.copy / float(np.median(times["copy"]))
    for name, (moved, _) in ready.items():
        seconds = float(np.median(times[name]))
        row = {"what": name, "bytes": moved, "milliseconds": round(1e3 * seconds, 4)}
        rates = {"gigabytes_per_second": round(moved / seconds / 1e9, 2)}
        rows.append({**label, **row, **rates, "share_of_copy": round(moved / seconds / bandwidth, 3)})
    return [{**row, "copy_gigabytes_per_second": round(bandwidth / 1e9, 1)} for row in rows]


def full_cache(sizes: Sizes, batch: int, heads: int, kv_heads: int, tokens: int) -> tuple[Any, Any, Any]:
    """A random query, and the full cache of one layer, [B, K, T, H]."""
    keys = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(keys[0], (batch, heads, sizes.head_dim), sizes.dtype)
    shape = (batch, kv_heads, tokens, sizes.head_dim)
    k, v = (jax.jit(partial(jax.random.normal, shape=shape, dtype=sizes.dtype))(key) for key in keys[1:])
    return q, k, v


def measure_decode(sizes: Sizes, batch: int, heads: int, kv_heads: int) -> list[dict[str, Any]]:
    """Times decode_attention over a pool of the kept entries, and over the full cache."""
    q, k, v = full_cache(sizes, batch, heads, kv_heads, sizes.tokens)
    slots_first = by_slot(k), by_slot(v)
    platform, rows = target_platform(), []
    for keep in KEEPS:
        kept = max(1, int(keep * sizes.tokens))
        slots = -(-kept // PAGE) * PAGE
        pool = k[:, :, :slots], v[:, :, :slots]
        theirs = q, *(x[:, :slots] for x in slots_first)
        start, length = jnp.zeros((batch, kv_heads), jnp.int32), jnp.full((batch, kv_heads), kept)
        moved = 2 * batch * kept * kv_heads * sizes.head_dim * k.dtype.itemsize
        contestants: Contestants = {
            name: (moved, partial(decode_attention, implementation=name), q, *pool, start, length)
            for name in names("decode_attention")
        }
        if keep < 1:
            where = jnp.sort(jax.random.permutation(jax.random.key(2), sizes.tokens)[:kept])
            everywhere = jnp.tile(where, (batch, 1))
            contestants["gather, then attend"] = moved, gather_and_attend, q, *slots_first, everywhere
        for name in ("xla", "cudnn") if platform == "gpu" else ("xla",):
            dots = f"jax.nn.dot_product_attention, {name}"
            contestants[dots] = moved, partial(dense, name), *theirs, length[:, 0]
        if platform == "gpu":
            contestants["jax's decode kernel"] = moved, gpu_decode, *theirs, length[:, 0]
        if platform in ("gpu", "tpu"):
            paged = gpu_paged if platform == "gpu" else tpu_paged
            contestants["jax's paged kernel"] = moved, paged, q, *(pages(x) for x in pool), length[:, 0]
        label = {"op": "decode_attention", "B": batch, "N": heads, "K": kv_heads, "H": sizes.head_dim}
        rows += compare(sizes, {**label, "T": sizes.tokens, "keep": keep, "dtype": k.dtype.name}, contestants)
    return rows


def measure_core(sizes: Sizes, batch: int, heads: int, kv_heads: int) -> list[dict[str, Any]]:
    """Times core_attention over a share of the stored entries, copying these out, and masking the others.

    A-VL's Figure 8 compares these at a share of 0.3 with attention to all stored entries.
    """
    stored, text = sizes.tokens // 2, 64
    q, k, v = full_cache(sizes, batch, heads, kv_heads, stored + text)
    per_head = (batch, kv_heads)
    segment = q, k, v, jnp.zeros(per_head, jnp.int32), jnp.full(per_head, stored + text)
    text_rows = jnp.tile(jnp.arange(stored, stored + text), (batch, 1))
    rows = []
    for share in CORE_SHARES:
        listed = int(share * stored)
        order = [jax.random.permutation(jax.random.key(b), stored)[:listed] for b in range(batch)]
        core = jnp.sort(jnp.stack(order), axis=1)
        mask = jnp.zeros((batch, stored + text), bool).at[jnp.arange(batch)[:, None], core].set(True)
        mask = jnp.broadcast_to(mask.at[:, stored:].set(True)[:, None], (*per_head, stored + text))
        moved = 2 * batch * (listed + text) * kv_heads * sizes.head_dim * k.dtype.itemsize
        arguments = *segment, core, jnp.full(batch, listed), jnp.full(per_head, stored)
        contestants: Contestants = {
            name: (moved, partial(core_attention, implementation=name), *arguments) for name in names("core_attention")
        }
        chosen = jnp.concatenate([core, text_rows], axis=1)
        contestants["gather, then attend"] = moved, gather_and_attend, q, by_slot(k), by_slot(v), chosen
        for name in names("decode_attention"):
            contestants[f"masked decode_attention, {name}"] = moved, partial(masked, name), *segment, mask
            attend = partial(decode_attention, implementation=name)
            contestants[f"all entries, {name}"] = 2 * k.nbytes, attend, *segment
        label = {"op": "core_attention", "B": batch, "N": heads, "K": kv_heads, "H": sizes.head_dim}
        rows += compare(sizes, {**label, "S": stored, "core": share, "dtype": k.dtype.name}, contestants)
    return rows


def measure_mass(sizes: Sizes) -> list[dict[str, Any]]:
    """Times attention_mass of 64 gathered rows and of all rows, attention_mass_rows, and prefill attention."""
    _, heads, kv_heads = sizes.models[-1]
    tokens, rows = sizes.prefill, 64
    keys = jax.random.split(jax.random.key(3), 3)
    q = jax.random.normal(keys[0], (heads, tokens, sizes.head_dim), sizes.dtype)
    k, v = (jax.random.normal(key, (kv_heads, tokens, sizes.head_dim), sizes.dtype) for key in keys[1:])
    mask, place = jnp.ones(tokens, bool), jnp.arange(tokens - rows, tokens)
    equal, equal_few = jnp.ones((1, tokens)), jnp.ones((1, rows))
    read = (q.nbytes * rows // tokens + k.nbytes, q.nbytes + k.nbytes)
    contestants: Contestants = {}
    for name in names("attention_mass"):
        run = partial(attention_mass, key_mask=mask, implementation=name)

        def gathered(q: Any, k: Any, run: Callable[..., Any] = run) -> Any:
            return run(q[:, place], k, row_weight=equal_few, row_place=place)

        contestants[f"{rows} rows, {name}"] = read[0], gathered, q, k
        contestants[f"all rows, {name}"] = read[1], partial(run, row_weight=equal), q, k
    for name in names("attention_mass_rows"):
        run = partial(mass_rows, key_weight=equal, key_mask=mask, implementation=name)
        contestants[f"along rows, {name}"] = read[1], run, q, k
    prompt = tuple(jnp.swapaxes(x, 0, 1)[None] for x in (q, k, v))
    for name in ("xla", "cudnn") if target_platform() == "gpu" else ("xla",):
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=name)
        contestants[f"prefill attention, {name}"] = q.nbytes * 2 + k.nbytes * 2, attend, *prompt
    contestants["prefill attention, vlkv"] = q.nbytes * 2 + k.nbytes * 2, prefill_attention, *prompt
    label = {"op": "attention_mass", "N": heads, "K": kv_heads, "H": sizes.head_dim, "T": tokens}
    return compare(sizes, {**label, "dtype": k.dtype.name}, contestants)


# --- alternatives ---------------------------------------------------------------------------------------------------


def by_slot(x: Any) -> Any:
    """Converts [B, K, P, H] to the layout of jax's own attention: [B, P, K, H]."""
    return jnp.swapaxes(x, 1, 2)


def gather_and_attend(q: Any, k: Any, v: Any, rows: Any) -> Any:
    """Copies the kept rows [B, C] of all heads out of the full cache [B, P, K, H] and attends to the copy."""
    k, v = (jnp.take_along_axis(x, rows[:, :, None, None], axis=1) for x in (k, v))
    return dense("xla", q, k, v, None)


def masked(name: str, q: Any, k: Any, v: Any, start: Any, length: Any, mask: Any) -> Any:
    """Attention to all stored entries with a mask that allows only the core."""
    return decode_attention(q, k, v, start, length, valid=mask, implementation=name)


def dense(name: Any, q: Any, k: Any, v: Any, length: Any) -> Any:
    """jax's own attention with one query and keys [B, P, K, H]."""
    return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=length, implementation=name)


def gpu_decode(q: Any, k: Any, v: Any, length: Any) -> Any:
    from jax.experimental.pallas.ops.gpu.decode_attention import gqa

    return gqa(q, k, v, kv_seq_len=length)


def gpu_paged(q: Any, k: Any, v: Any, length: Any) -> Any:
    """jax's paged kernel (Triton), pages in order."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    return paged_attention(q / math.sqrt(q.shape[-1]), k, v, table(q, k), length)


def tpu_paged(q: Any, k: Any, v: Any, length: Any) -> Any:
    """jax's paged kernel (Mosaic), pages in order."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    each = k.shape[1] // q.shape[0]
    at_once = next(n for n in (32, 16, 8, 4, 2, 1) if each % n == 0)
    return paged_attention(
        q / math.sqrt(q.shape[-1]), k, v, length.astype(jnp.int32), table(q, k), pages_per_compute_block=at_once
    )


def pages(x: Any) -> Any:
    """Converts [B, K, P, H] to the layout of the paged kernels: [K, pages of all rows, PAGE, H]."""
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, PAGE, x.shape[3])


def table(q: Any, k: Any) -> Any:
    """The pages of each row."""
    return jnp.arange(k.shape[1], dtype=jnp.int32).reshape(q.shape[0], -1)


def show(result: dict[str, Any]) -> None:
    console = Console(width=130)
    device = result["machine"]["device"]
    fast = Table("op", "shape", "what", "ms", "GB/s", "of a copy", title=f"Times on {device}, medians")
    for row in result["rows"]:
        shape = " ".join(f"{name}={row[name]}" for name in ("B", "N", "K", "T", "S", "keep", "core") if name in row)
        if "error" in row:
            fast.add_row(row["op"], shape, row["what"], row["error"], "", "")
        else:
            numbers = f"{row['milliseconds']:.3f}", f"{row['gigabytes_per_second']:.1f}", f"{row['share_of_copy']:.0%}"
            fast.add_row(row["op"], shape, row["what"], *numbers)
    console.print(fast)


if __name__ == "__main__":
    main()
