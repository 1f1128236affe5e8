"""Published tables of times, operations and memory: measures the same settings and prints our figures beside them.

    python -m benchmarks.published aircache-table-3 --out OUT.json [--model mini] [--batch 8] [--dry-run]

Figures are copied as printed. Where a paper does not give a setting, `notes` says what is used instead. "k" is 1024
tokens. Every table's throughput counts decoding alone, except PrefixKV's.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Printed

from vlkv import policies
from vlkv.analysis import cost
from vlkv.compression.sizes import total_bound, vision_bounds
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.policies import Policy
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.benching import machine
from vlkv.tools.benching.measuring import measure_missing
from vlkv.tools.benching.results import Line, Results, identity
from vlkv.tools.benching.settings import Setting, check_policy, grid, label
from vlkv.tools.benching.subjects import Subject, find
from vlkv.tools.benching.tables import plan, show, sizes

Figures = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Point:
    """One line of a table: what was measured, and what was printed."""

    model: str  # a name of vlkv.presets
    setting: Setting
    policy: Policy
    figures: Figures


@dataclasses.dataclass(frozen=True)
class Table:
    """One published table."""

    title: str
    hardware: str
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    computed: bool = False  # from the config, not timed


# Computes a printed figure from a measured row.
OURS: dict[str, Callable[[dict[str, Any]], float]] = {
    "prefill_seconds": lambda row: row["prefill_seconds"],
    "decode_seconds": lambda row: row["decode_seconds"],
    "tokens_per_second": lambda row: row["tokens_per_second"],
    "total_seconds": lambda row: row["prefill_seconds"] + row["decode_seconds"],
    "total_tokens_per_second": lambda row: (
        row["tokens_per_second"] * row["decode_seconds"] / (row["prefill_seconds"] + row["decode_seconds"])
    ),
    "step_milliseconds": lambda row: 1e3 * row["step_seconds"],
    "first_token_milliseconds": lambda row: 1e3 * row["prefill_seconds"],
    "relative_decode": lambda row: row["to_full"]["decode"] if "to_full" in row else 1.0,
    "cache_gib": lambda row: row["cache_bytes"] / 2**30,
    "cache_megabytes": lambda row: row["cache_bytes"] / 1e6,
    "teraflops": lambda row: row["teraflops"],
}


def _aircache(model: str, batch: int, kilo: int, *figures: float) -> Iterator[Point]:
    """Points of one row: prefill full, AirCache; decoding full, 50 %, 10 %; throughput full, 50 %, 10 %."""
    setting = Setting(batch, 1024 * kilo, 64, 512)
    full, ours, *rest = figures
    for i, policy in enumerate([policies.Full(), *(policies.AirCache(keep=keep) for keep in (0.5, 0.1))]):
        printed = {"prefill_seconds": ours if i else full, "decode_seconds": rest[i], "tokens_per_second": rest[3 + i]}
        yield Point(model, setting, policy, printed)


_A100 = "A100 80 GB"
_TOWER = "decoder only: the vision tower, which costs the same with every policy, is not run"

_AIRCACHE_3 = Table(
    "AirCache, Table 3: LLaVA-OneVision-7B, 512 new tokens, 64 of the prompt text",
    _A100,
    (
        *_aircache("llava-onevision-7b", 8, 2, 1.6, 1.8, 11.6, 9.4, 8.2, 353, 436, 500),
        *_aircache("llava-onevision-7b", 8, 8, 4.9, 5.3, 15.0, 11.9, 9.4, 273, 344, 436),
        *_aircache("llava-onevision-7b", 8, 16, 11.3, 11.9, 21.7, 15.0, 10.4, 189, 273, 394),
        *_aircache("llava-onevision-7b", 8, 32, 25.2, 26.4, 35.9, 22.0, 12.3, 114, 186, 333),
        *_aircache("llava-onevision-7b", 16, 2, 2.3, 2.5, 14.4, 11.2, 9.7, 569, 731, 845),
        *_aircache("llava-onevision-7b", 16, 8, 9.4, 9.8, 22.6, 15.6, 11.8, 362, 525, 694),
        *_aircache("llava-onevision-7b", 16, 16, 20.3, 21.4, 36.9, 23.0, 12.8, 222, 356, 640),
    ),
    (
        _TOWER,
        "the table names no model: the paper's main model is used, because Table 9 has the two others",
        'the paper prints one prefill time for "ours": it is shown for both shares',
    ),
)
_AT_4 = Setting(16, 8 * 1024, 64, 512)
_AIRCACHE_4 = Table(
    "AirCache, Table 4 (latency): batch 16, 8k tokens, keep 10 %",
    _A100,
    tuple(
        Point("llava-onevision-7b", _AT_4, policy, {"prefill_seconds": prefill, "decode_seconds": decode})
        for policy, prefill, decode in (
            (policies.Full(), 9.4, 22.6),
            (policies.FastV(keep=0.1), 5.4, 11.7),
            (policies.FasterVLM(keep=0.1), 5.2, 11.3),
            (policies.IVTP(keep=0.1, groups=0.316), 5.8, 12.6),
            (policies.AirCache(keep=0.1), 9.8, 11.8),
        )
    ),
    (
        _TOWER,
        "LLaVA-OneVision's tower has no class token: FasterVLM ranks by the tower's mean attention, here 0",
        "the shares of IVTP's two stages are not given: here each keeps the square root of 10 %",
    ),
)
_AIRCACHE_6 = Table(
    "AirCache, Table 6: LLaVA-OneVision-7B, eviction among all tokens (starred rows) or vision tokens alone",
    _A100,
    tuple(
        Point("llava-onevision-7b", Setting(1, 8 * 1024, 64, 512), make(keep), {"total_seconds": time})
        for make, seconds in (
            (lambda keep: policies.H2O(keep=keep, scope="all"), (407, 559, 733, 1048)),
            (lambda keep: policies.H2O(keep=keep, scope="vision"), (323, 251, 239, 215)),
            (lambda keep: policies.AirCache(keep=keep, scope="all"), (374, 530, 688, 963)),
            (lambda keep: policies.AirCache(keep=keep), (306, 235, 221, 207)),
        )
        for keep, time in zip((0.5, 0.1, 0.05, 0.01), seconds, strict=True)
    ),
    (
        _TOWER,
        "the paper's seconds are for a whole benchmark that it does not name: compare rows only with each other",
        "starred rows take longer in the paper because the answers get longer: here all have 512 tokens",
    ),
)
_AIRCACHE_9 = Table(
    "AirCache, Table 9: InternVL2-8B and Qwen2-VL-7B, 512 new tokens, 64 of the prompt text",
    _A100,
    (
        *_aircache("internvl2-8b", 8, 2, 1.2, 1.4, 9.3, 7.0, 5.9, 440, 585, 694),
        *_aircache("internvl2-8b", 8, 8, 4.6, 5.0, 13.3, 10.5, 8.8, 308, 390, 465),
        *_aircache("internvl2-8b", 8, 16, 9.8, 10.5, 24.8, 15.7, 11.9, 165, 261, 344),
        *_aircache("internvl2-8b", 8, 32, 23.8, 24.8, 46.2, 28.1, 18.2, 89, 146, 225),
        *_aircache("internvl2-8b", 16, 2, 2.5, 2.7, 12.2, 7.4, 6.0, 671, 1107, 1365),
        *_aircache("internvl2-8b", 16, 8, 9.9, 10.6, 21.6, 12.9, 8.9, 379, 635, 920),
        *_aircache("internvl2-8b", 16, 16, 21.6, 22.4, 28.5, 16.2, 10.0, 287, 506, 819),
        *_aircache("qwen2-vl-7b", 8, 2, 1.1, 1.3, 8.4, 6.6, 5.2, 488, 621, 788),
        *_aircache("qwen2-vl-7b", 8, 8, 4.3, 4.7, 12.6, 9.7, 8.1, 325, 422, 506),
        *_aircache("qwen2-vl-7b", 8, 16, 9.4, 10.2, 23.7, 14.9, 11.2, 173, 275, 366),
        *_aircache("qwen2-vl-7b", 8, 32, 22.7, 24.0, 45.0, 26.2, 14.6, 91, 156, 214),
        *_aircache("qwen2-vl-7b", 16, 2, 2.1, 2.3, 10.1, 6.8, 5.2, 811, 1205, 1575),
        *_aircache("qwen2-vl-7b", 16, 8, 8.6, 9.2, 19.7, 12.1, 8.4, 426, 677, 975),
        *_aircache("qwen2-vl-7b", 16, 16, 19.2, 20.1, 27.0, 15.6, 9.7, 303, 525, 845),
    ),
    (
        _TOWER,
        "214 token/s of Qwen2-VL-7B at 8 x 32k is as printed, but 14.6 s would give 281",
        "InternVL2-8B, batch 16: two rows say 16k in our copy of the table; the first is taken as 8k",
    ),
)


def _prefixkv(model: str, batch: int, prompt: int, new: int, *latency: float, speed: tuple[float, ...]) -> Any:
    """Points of one row: seconds and tokens per second at 20, 40, 60, 80 % and full, until memory ran out."""
    shares = (0.2, 0.4, 0.6, 0.8)
    contestants = [policies.Full(), *(policies.PrefixKV(keep=keep) for keep in shares)]
    seconds, speeds = dict(zip((*shares, 1.0), latency, strict=False)), dict(zip(shares, speed, strict=False))
    for policy in contestants:
        printed = {
            "total_seconds": seconds.get(policy.keep or 1.0),
            "total_tokens_per_second": speeds.get(policy.keep or 1.0),
        }
        figures = {name: figure for name, figure in printed.items() if figure is not None}
        yield Point(model, Setting(batch, prompt, prompt - 576, new), policy, figures)


_PREFIXKV_3 = Table(
    "PrefixKV, Table 3: LLaVA-1.5, one image",
    "A100 (memory not given)",
    (
        *_prefixkv("llava-1.5-13b", 8, 1024, 512, 20.0, 24.3, 27.5, 29.7, 30.5, speed=(204.6, 168.1, 148.7, 137.6)),
        *_prefixkv("llava-1.5-13b", 16, 624, 256, 11.7, 14.2, 15.9, 17.3, 17.8, speed=(349.5, 288.0, 256.3, 236.5)),
        *_prefixkv("llava-1.5-7b", 16, 1024, 512, 16.8, 22.5, 26.6, 29.5, 30.7, speed=(486.7, 363.3, 307.9, 276.9)),
        *_prefixkv("llava-1.5-7b", 48, 624, 256, 13.1, speed=(934.4,)),
    ),
    (
        _TOWER,
        "seconds are of prefill and decoding together; at batch 48 all but 20 % ran out of memory",
        "the full cache's throughput is not in our copy of the table",
    ),
)
_AT_CSP = Setting(1, 3217, 65, 128)
_CSP_2 = Table(
    "CSP, Table 2: LLaVA-1.5-7B on samples of ALFRED",
    "RTX 4090",
    tuple(
        Point("llava-1.5-7b", _AT_CSP, policy, {"step_milliseconds": step, "cache_gib": size})
        for policy, step, size in (
            (policies.Full(), 26.023, 1.571),
            (policies.CSP(keep=0.6), 24.377, 1.207),
            (policies.CSP(keep=0.3), 21.027, 0.523),
            (policies.CSP(keep=0.2), 19.736, 0.476),
            (policies.CSP(keep=0.1), 16.287, 0.208),
        )
    ),
    (
        "prompt length not given: 1.571 GiB hold 3217 tokens of 512 KiB",
        "batch and number of new tokens not given: here 1 and 128",
        "our bytes include the capacity for new tokens",
    ),
)


def _avl() -> Iterator[Point]:
    # Sec. "Decoder Inference Latency": 50 % of the cache is 1.8 times as fast, the core alone 1.1 times more.
    for batch in (1, 2, 4, 8):
        setting = Setting(batch, 2880 + 64, 64, 128)
        for policy, share in (
            (policies.Full(), 1.0),
            (policies.AVL(keep=0.5, core=None), 1 / 1.8),
            (policies.AVL(keep=0.5, core=0.3), 0.505),
        ):
            yield Point("llava-next-vicuna-7b", setting, policy, {"relative_decode": round(share, 3)})


_AVL_LATENCY = Table(
    "A-VL, Decoder Inference Latency: LLaVA-1.6-7B, 50 % of the cache kept",
    "A40",
    tuple(_avl()),
    ("batches and prompt length not given: here five tiles of 576 tokens", "1 / 1.8 and 50.5 % hold for all batches"),
)
_AVL_3 = {  # megabytes, then S, C, P, T in percent; numbers of vision and other tokens follow from the megabytes
    ("llava-1.5-7b", 576, 70): (
        (339,), (156, 40), (156, 40, 30), (170, 45, 30, 90), (163, 45, 30, 90, 50),
    ),
    ("llava-1.5-13b", 576, 70): (
        (529,), (243, 40), (265, 45, 30), (265, 45, 30, 90), (254, 45, 30, 90, 60),
    ),
    ("llava-next-vicuna-7b", 2144, 105): ((1179,), (507, 40), (554, 45, 30, 90), (531, 45, 30, 90, 70)),
    ("llava-next-vicuna-13b", 2144, 105): ((1841,), (792, 40), (865, 45, 30, 90), (828, 45, 30, 90, 70)),
}  # fmt: skip


def _avl_3() -> Iterator[Point]:
    for (model, vision, others), lines in _AVL_3.items():
        for megabytes, *percent in lines:
            stored, core, prefill, text = (x / 100 for x in (*percent, *[0] * (4 - len(percent))))
            policy: Policy = policies.Full()
            if stored:
                policy = policies.AVL(keep=stored, core=core or None, prefill=prefill or None, text=text or None)
            new = 2  # one of them is cached
            setting = Setting(1, vision + others - 1, others - 1, new)
            yield Point(model, setting, policy, {"cache_megabytes": megabytes})


# Table 6 counts layers from 0 and reduces after the named layer; our option is the number of layers before.
_LAMBDA: dict[tuple[int, ...], tuple[int, ...]] = {(15, 23, 31): (16, 24, 32), (17, 24, 31): (18, 25, 32)}
_LIGHTKV_SIZES = {
    "llava-1.5-13b": 576,
    "llava-1.5-7b": 576,
    "llava-next-vicuna-13b": 2144,
    "llava-next-vicuna-7b": 2144,
}
_LIGHTKV_NOTES = (
    _TOWER,
    "prompt lengths not given: 48 text and 576 or 2144 vision tokens give the paper's FLOPs and bytes",
)


def _lightkv(model: str, method: Policy, new: int, **figures: float) -> Point:
    vision = _LIGHTKV_SIZES[model]
    return Point(model, Setting(1, vision + 48, 48, new), method, figures)


def _lambda(model: str, printed: tuple[int, ...] = (15, 23, 31)) -> tuple[int, ...] | None:
    """LightKV's layers of a 13B model; None (scaled to the depth) for others, since the paper does not give theirs."""
    return _LAMBDA[printed] if model.endswith("13b") else None


def _light(model: str, windows: tuple[int, ...] | None = None, layers: tuple[int, ...] = (15, 23, 31)) -> Policy:
    windows = windows or ((6, 4, 2) if "next" in model else (4, 2, 1))  # App. E.2
    return policies.LightKV(layers=_lambda(model, layers), windows=windows)


def _rivals(model: str) -> tuple[Policy, ...]:
    """The methods that reduce the prompt, in the order of Tables 1 and 10."""
    stages = _lambda(model)
    return (
        policies.FastV(keep=0.53),
        policies.PiToMe(keep=0.125, layers=stages),
        policies.ToFu(keep=0.125, layers=stages),
        policies.ToMe(keep=0.125, layers=stages),
        _light(model),
    )


def _lightkv_1() -> Iterator[Point]:
    """Tera-operations and GiB: full; Elastic, Rand, ImgRand, ToMe (C) after prefill; FastV to LightKV during it."""
    printed = {
        "llava-1.5-13b": ((19.4, 0.55), (19.3, 0.31), (19.0, 0.31), (19.0, 0.31), (19.0, 0.33),
                          (12.4, 0.37), (12.6, 0.37), (12.6, 0.37), (12.6, 0.37), (12.6, 0.37)),
        "llava-1.5-7b": ((10.2, 0.35), (10.2, 0.20), (9.9, 0.20), (9.9, 0.20), (10.0, 0.21),
                         (5.3, 0.22), (6.6, 0.23), (6.6, 0.23), (6.6, 0.23), (6.6, 0.23)),
        "llava-next-vicuna-13b": ((65.0, 1.75), None, (60.8, 0.91), (60.8, 0.91), (61.3, 0.93),
                                  (36.1, 1.03), (37.3, 1.05), (37.3, 1.05), (37.3, 1.05), (37.3, 1.05)),
        "llava-next-vicuna-7b": ((34.8, 1.12), (34.7, 0.58), (32.2, 0.58), (32.2, 0.58), (32.5, 0.60),
                                 (18.5, 0.65), (20.0, 0.67), (20.0, 0.67), (21.1, 0.67), (22.3, 0.67)),
    }  # fmt: skip
    for model, lines in printed.items():
        keep = 0.485 if "next" in model else 0.45
        methods = (
            policies.Full(),
            policies.ElasticCache(keep=keep, scope="vision"),
            policies.Random(keep=keep, scope="vision"),
            policies.ImgRandom(keep=keep),
            policies.ToMe(keep=0.5, on="cache"),
            *_rivals(model),
        )
        for method, line in zip(methods, lines, strict=True):
            if line is not None:  # out of memory
                yield _lightkv(model, method, 100, teraflops=line[0], cache_gib=line[1])


def _lightkv_2() -> Iterator[Point]:
    """InternVL2-8B; methods in the order of the table."""
    setting = Setting(1, 7 * 256 + 74, 74, 100)
    yield Point("internvl2-8b", setting, policies.Full(), {"teraflops": 35.7, "cache_gib": 0.24})
    for rate, flops, size in ((0.6, 24.0, 0.15), (0.55, 22.9, 0.14)):
        light = policies.LightKV(rate=rate)
        stages = light.reductions(32)
        fastv = policies.FastV(keep=round((32 * rate - 2) / 30, 3))  # two layers see all tokens
        rivals = (kind(keep=0.125, layers=stages) for kind in (policies.ToFu, policies.PiToMe, policies.ToMe))
        for method in (fastv, *rivals, light):
            printed = 24.8 if method == fastv and rate == 0.6 else flops
            yield Point("internvl2-8b", setting, method, {"teraflops": printed, "cache_gib": size})


def _lightkv_10() -> Iterator[Point]:
    printed = {
        "llava-1.5-13b": ((111, 3.85), (77, 2.52), (82, 2.85), (81, 2.86), (81, 2.86), (84, 2.87)),
        "llava-1.5-7b": ((64, 3.00), (47, 1.70), (53, 2.14), (51, 2.13), (54, 2.10), (51, 2.11)),
        "llava-next-vicuna-13b": ((386, 4.17), (259, 2.94), (270, 3.29), (268, 3.28), (268, 3.28), (271, 3.31)),
        "llava-next-vicuna-7b": ((225, 3.20), (148, 1.83), (157, 2.26), (155, 2.24), (155, 2.23), (159, 2.24)),
    }
    for model, lines in printed.items():
        for method, (first, generation) in zip((policies.Full(), *_rivals(model)), lines, strict=True):
            yield _lightkv(model, method, 100, first_token_milliseconds=first, decode_seconds=generation)


def _lightkv_4() -> Iterator[Point]:
    for model, full, light in (("llava-1.5-13b", 111, 84), ("llava-next-vicuna-13b", 386, 271)):
        yield _lightkv(model, policies.Full(), 2, first_token_milliseconds=full)
        yield _lightkv(model, _light(model), 2, first_token_milliseconds=light)


def _lightkv_6() -> Iterator[Point]:
    for model, full, early, late in (
        ("llava-1.5-13b", (19.4, 0.55), (12.6, 0.37), (13.1, 0.38)),
        ("llava-next-vicuna-13b", (65.0, 1.75), (37.3, 1.05), (39.0, 1.09)),
    ):
        yield _lightkv(model, policies.Full(), 100, teraflops=full[0], cache_gib=full[1])
        for layers, (flops, size) in (((15, 23, 31), early), ((17, 24, 31), late)):
            for windows in ((4, 2, 1), (6, 4, 2)):
                yield _lightkv(model, _light(model, windows, layers), 100, teraflops=flops, cache_gib=size)


TABLES: dict[str, Table] = {
    "aircache-table-3": _AIRCACHE_3,
    "aircache-table-4": _AIRCACHE_4,
    "aircache-table-6": _AIRCACHE_6,
    "aircache-table-9": _AIRCACHE_9,
    "prefixkv-table-3": _PREFIXKV_3,
    "csp-table-2": _CSP_2,
    "a-vl-latency": _AVL_LATENCY,
    "a-vl-table-3": Table(
        "A-VL, Table 3: memory of the cache", "not given", tuple(_avl_3()),
        ("prompt lengths not given: the full cache's megabytes hold 646 and 2249 tokens",
         "our bytes are those allocated, in tiles of 16 slots; K = 3 if there is a core"),
    ),
    "lightkv-table-1": Table(
        "LightKV, Table 1: operations and cache of LLaVA at 55 %", "counted, not timed", tuple(_lightkv_1()),
        (_LIGHTKV_NOTES[1], "tower, all logits and 100 new tokens counted; the cache is what is kept, unpadded",
         "methods after prefill keep the share that gives the printed bytes: 45 %, 48.5 % for NeXT, ToMe (C) 50 %",
         "HiRED is left out, because its share is not given. Methods after prefill compute the whole prefill"),
        computed=True,
    ),
    "lightkv-table-2": Table(
        "LightKV, Table 2: operations and cache of InternVL2-8B", "counted, not timed", tuple(_lightkv_2()),
        ("prompt not given: the full cache's 0.24 GiB hold seven tiles and 74 text tokens",
         "Lambda not given: rate= is set so that 60 and 55 % of the vision tokens are left on average"),
        computed=True,
    ),
    "lightkv-table-4": Table(
        "LightKV, Table 4: time to the first token, LLaVA 13B", "A100 (memory not given)", tuple(_lightkv_4()),
        (*_LIGHTKV_NOTES, "windows 4, 2, 1, for NeXT 6, 4, 2; printed deviations 0.91, 0.72, 2.22 and 0.79 ms"),
    ),
    "lightkv-table-6": Table(
        "LightKV, Table 6: operations and cache, LLaVA 13B", "counted, not timed", tuple(_lightkv_6()),
        (_LIGHTKV_NOTES[1], "tower, all logits and 100 new tokens counted; the cache is what is kept, unpadded"),
        computed=True,
    ),
    "lightkv-table-10": Table(
        "LightKV, Table 10: first token, and 100 new tokens", "A100 (memory not given)", tuple(_lightkv_10()),
        (*_LIGHTKV_NOTES, "FastV keeps 53 %, so that 55 % are left on average; the paper does not print its share"),
    ),
}  # fmt: skip


def count(config: ModelConfig, point: Point) -> dict[str, float]:
    """Teraflops of the whole job and bytes of the cache at its end, of one row, by `vlkv.analysis.cost`."""
    c, setting, policy = config.decoder, point.setting, point.policy
    vision = vision_bounds(policy, layers=c.layers, vision=setting.vision, images=1)
    prompt = np.array(vision) + setting.text
    total = total_bound(policy, layers=c.layers, vision=setting.vision, text=setting.text)
    held = np.array(
        [total // c.layers + (i < total % c.layers) for i in range(c.layers)]
    )  # the cost of decoding is linear in them
    flops = cost.prefill_flops(c, prompt).sum() + cost.logits_flops(c, int(prompt[-1]) + setting.new - 1)
    if config.vision is not None:
        merge = getattr(config.wiring, "merge", 1)
        each = config.vision.tokens // merge**2
        cut = setting.vision > each and setting.vision % each > 0  # padding was cut: one tile more ran than they fill
        flops += cost.tower_flops(config.vision, c.width, -(-setting.vision // each) + cut, merge=merge)
    flops += sum(cost.decode_flops(c, held + i).sum() for i in range(1, setting.new))
    size = cost.cache_bytes(c, held + setting.new, 2).sum()
    return {"teraflops": float(flops / 1e12), "cache_bytes": float(size)}


def beside(
    console: Console, table: Table, lines: Sequence[tuple[Point, Line, dict[str, Any]]], machine: dict[str, Any]
) -> None:
    """Prints each number of a paper with ours, and both relative to the full cache."""
    shown = Printed("model", "batch", "prompt", "new", "policy", "figure", "paper", "ours", "paper/full", "ours/full")
    full: dict[tuple[Any, ...], tuple[Figures, dict[str, Any]]] = {}
    for point, (subject, setting, policy), row in lines:
        place = subject.name, point.setting
        if isinstance(policy, policies.Full):
            full[place] = point.figures, row
        printed_figures: dict[str, float | None] = {**point.figures} or {"total_seconds": None}
        for figure, printed in printed_figures.items():
            ours = None if "error" in row else OURS[figure](row)
            shares = ["", ""]
            if place in full and not isinstance(policy, policies.Full):
                theirs, base = full[place]
                if printed is not None and theirs.get(figure):
                    shares[0] = f"{printed / theirs[figure]:.2f}"
                if ours is not None and "error" not in base:
                    shares[1] = f"{ours / OURS[figure](base):.2f}"
            batch, prompt, _, new = sizes(setting)
            shown.add_row(
                subject.name, batch, prompt, new, label(policy), figure.replace("_", " "),
                "" if printed is None else f"{printed:g}", row["error"] if ours is None else f"{ours:.4g}", *shares,
            )  # fmt: skip
    where = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    ours_on = f"{where}, {machine['cores']} cores, jax {machine['jax']}, {machine['commit']}"
    console.print(f"{table.title}. Paper: {table.hardware}. Ours: {ours_on}", highlight=False)
    show(console, shown)
    for note in table.notes:
        console.print(f"- {note}", highlight=False)
    changed = {
        part for point, (subject, setting, _), _ in lines
        for part, differs in (("model", subject.name != point.model), ("prompt or tokens", setting != point.setting))
        if differs
    }  # fmt: skip
    if changed and not table.computed:
        console.print(f"- not the paper's setting: different {' and '.join(sorted(changed))}", highlight=False)


def parser() -> argparse.ArgumentParser:
    """The options of this command."""
    made = OneLineParser(prog="python -m benchmarks.published", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("table", choices=list(TABLES), metavar="TABLE", help=f"one of {', '.join(TABLES)}")
    made.add_argument("--model", metavar="NAME", help="as in vlkv bench (default: the model of the table)")
    made.add_argument("--batch", type=int, nargs="+", metavar="B", help="only lines with these numbers of rows")
    made.add_argument("--prompt", type=int, nargs="+", metavar="T", help="only lines with prompts of these lengths")
    made.add_argument("--new", type=int, metavar="S", help="generated tokens (default: those of the table)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="measurements of each (default: 5)")
    made.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights")
    made.add_argument("--out", type=Path, metavar="JSON", help="file of results, from which a run resumes")
    made.add_argument("--dry-run", action="store_true", help="only print the plan and the bytes it needs")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(args: argparse.Namespace) -> Any:
    """Prints a table, or returns the same content for JSON."""
    table = TABLES[args.table]
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 160)
    points, work = _work(table, args)
    lines = [(subject, setting, policy) for subject, setting, contestants in work for policy in contestants]
    if table.computed:
        rows = [count(line[0].config, point) for point, line in zip(points, lines, strict=True)]
        beside(console, table, list(zip(points, lines, rows, strict=True)), machine.describe())
        return rows if args.json else None
    results = Results(args.out, "python -m benchmarks.published " + " ".join(sys.argv[1:]))
    if args.dry_run:
        plan(console, lines, [results.find(identity(line)) is not None for line in lines])
        return [identity(line) for line in lines] if args.json else None
    measure_missing(work, results, rounds=args.rounds)
    rows = [results.find(identity(line)) or {} for line in lines]
    beside(console, table, list(zip(points, lines, rows, strict=True)), results.content["machine"])
    return results.content if args.json else None


def _work(table: Table, args: argparse.Namespace) -> tuple[list[Point], list[tuple[Subject, Setting, list[Policy]]]]:
    """The chosen points, and the measurements of them in the same order."""
    chosen = [
        point for point in table.points
        if (args.batch is None or point.setting.batch in args.batch)
        and (args.prompt is None or point.setting.prompt in args.prompt)
    ]  # fmt: skip
    if not chosen:
        known = sorted({(point.setting.batch, point.setting.prompt) for point in table.points})
        raise InputError(f"{args.table} has no such line; batch and prompt are one of {known}")
    points, work = [], []
    for model, at in dict.fromkeys((point.model, point.setting) for point in chosen):
        lines = [point for point in chosen if (point.model, point.setting) == (model, at)]
        subject = find(args.model or model, dtype=args.dtype)
        new = at.new if args.new is None else args.new
        setting = grid(subject.config, batches=[at.batch], prompts=[at.prompt], text=at.text, new=new)[0]
        for point in lines:
            check_policy(point.policy, subject.config)
        points += lines
        work.append((subject, setting, [point.policy for point in lines]))
    return points, work


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parser().parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
