"""LightKV: settings of its tables and figures.

Lambda is the number of layers before each compression, as in Eq. 9: 15, 23 and 31 of 40 give the 55 % of the tables.
Models of other depths scale it, because the paper prints it for 13B alone. Methods after prefill drop half of what they
prune (Sec. 4.1): Elastic and Rand of all tokens, ToMe (C) of the vision tokens; ImgRand drops as many tokens as Rand,
but only vision tokens. This gives the bytes of Table 1. FastV prunes after two layers so that the share of the table is
left over all layers. HiRED's share is not printed: here that of the table.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.commands import Evaluation, Inspection, Item, Row, averages, speed
from benchmarks.papers.points import TOWER, Figures, Point, SpeedTable
from vlkv.policies import LightKV, Policy, make
from vlkv.tools.benching.settings import Setting

RATE = 0.55
_TEXT = 48  # prompt lengths are not printed: with 576 and 2144 vision tokens these give the FLOPs and bytes
_NAMES = {
    "llava-1.5-13b": "LLaVA-v1.5-13B", "llava-1.5-7b": "LLaVA-v1.5-7B",
    "llava-next-vicuna-13b": "LLaVA-NeXT-13B", "llava-next-vicuna-7b": "LLaVA-NeXT-7B",
}  # fmt: skip
_VISION = {"llava-1.5": 576, "llava-next": 2144}
_METRICS = {  # Sec. 4.1: captions, open answers, and the scores of MME and POPE
    "COCO": "cider", "GQA": "exact", "MME C": "mme", "MME P": "mme", "NoCaps": "cider", "POPE": "exact pope-f1",
    "SEED": "exact", "SQA": "exact", "VizWiz": "vqa", "DocVQA": "anls",
}  # fmt: skip


def _family(model: str) -> str:
    return "llava-next" if "next" in model else "llava-1.5"


def light(model: str, windows: str = "", layers: str = "") -> str:
    """LightKV on LLaVA: windows 4, 2, 1, and 6, 4, 2 on NeXT (App. E.2)."""
    windows = windows or ("6,4,2" if "next" in model else "")
    options = [f"layers=({layers})"] * bool(layers) + [f"windows=({windows})"] * bool(windows)
    return f"lightkv({','.join(options)})" if options else "lightkv"


def fastv(rate: float, depth: int) -> str:
    """FastV with the share that leaves `rate` of the vision entries of all layers; two layers see all tokens."""
    return f"fastv(keep={round((depth * rate - 2) / (depth - 2), 3)})"


def merging(rate: float, depth: int) -> dict[str, str]:
    """The other merging methods after LightKV's layers for this rate."""
    layers = ",".join(f"{{{after}}}" for after in LightKV(rate=rate).reductions(depth))
    return {name: f"{kind}(keep=0.125,layers=({layers}))" for name, kind in _MERGING.items()}


_MERGING = {"ToFu": "tofu", "PiToMe": "pitome", "ToMe (P)": "tome"}


def _method(name: str, model: str) -> str:
    """The policy of a row of Tables 1 and 10."""
    if name in _MERGING:
        return f"{_MERGING[name]}(keep=0.125)"
    vision = _VISION[_family(model)]
    images = round(((vision + _TEXT) / 2 - _TEXT) / vision, 3)
    return {
        "Vanilla": "full",
        "Elastic": "elasticcache(keep=0.5,scope='all')",
        "Rand": "random(keep=0.5,scope='all')",
        "ImgRand": f"imgrandom(keep={images})",
        "ToMe (C)": "tome(keep=0.5,on='cache')",
        "HiRED": f"hired(keep={RATE})",
        "FastV": fastv(RATE, 40 if model.endswith("13b") else 32),
        "LightKV": light(model),
    }[name]


# Rows in the paper's order, by model; tera-operations and GiB if they are printed.
_NOT = None
_TABLE_1: dict[str, dict[str, tuple[float, float] | None]] = {
    "llava-1.5-13b": {
        "Vanilla": (19.4, 0.55), "Elastic": (19.3, 0.31), "Rand": (19.0, 0.31), "ImgRand": (19.0, 0.31),
        "ToMe (C)": (19.0, 0.33), "ToFu": (12.6, 0.37), "PiToMe": (12.6, 0.37), "ToMe (P)": (12.6, 0.37),
        "LightKV": (12.6, 0.37), "FastV": (12.4, 0.37),
    },
    "llava-1.5-7b": {
        "Vanilla": (10.2, 0.35), "Elastic": (10.2, 0.20), "Rand": (9.9, 0.20), "ToMe (C)": (10.0, 0.21),
        "ImgRand": (9.9, 0.20), "HiRED": _NOT, "ToFu": (6.6, 0.23), "ToMe (P)": (6.6, 0.23), "PiToMe": (6.6, 0.23),
        "FastV": (5.3, 0.22), "LightKV": (6.6, 0.23),
    },
    "llava-next-vicuna-13b": {
        "Vanilla": (65.0, 1.75), "Elastic": _NOT, "Rand": (60.8, 0.91), "ToMe (C)": (61.3, 0.93),
        "ImgRand": (60.8, 0.91), "ToMe (P)": (37.3, 1.05), "ToFu": (37.3, 1.05), "PiToMe": (37.3, 1.05),
        "FastV": (36.1, 1.03), "LightKV": (37.3, 1.05),
    },
    "llava-next-vicuna-7b": {
        "Vanilla": (34.8, 1.12), "Elastic": (34.7, 0.58), "Rand": (32.2, 0.58), "ImgRand": (32.2, 0.58),
        "ToMe (C)": (32.5, 0.60), "FastV": (18.5, 0.65), "HiRED": _NOT, "ToMe (P)": (21.1, 0.67),
        "ToFu": (20.0, 0.67), "PiToMe": (20.0, 0.67), "LightKV": (22.3, 0.67),
    },
}  # fmt: skip
# InternVL2-8B, by rate: rows in the paper's order, tera-operations and GiB.
_TABLE_2: dict[float, dict[str, tuple[float, float]]] = {
    0.6: {"FastV": (24.8, 0.15), **dict.fromkeys(("ToFu", "PiToMe", "ToMe (P)", "LightKV"), (24.0, 0.15))},
    0.55: dict.fromkeys(("FastV", "PiToMe", "ToMe (P)", "ToFu", "LightKV"), (22.9, 0.14)),
}
_INTERNVL = 32  # layers


def _by_rate(rate: float, depth: int) -> dict[str, str]:
    """The policies of Tables 2 and 7, where Lambda is not printed."""
    return {"FastV": fastv(rate, depth), **merging(rate, depth), "LightKV": f"lightkv(rate={rate})"}


def _runs(table: tuple[Row, ...], model: str, data: str, layers: int | None = None) -> tuple[Evaluation, ...]:
    """A run for each of the metrics of these data sets."""
    names: dict[str, list[str]] = {}
    for name in data.split(", "):
        names.setdefault(_METRICS[name], []).append(name)
    return tuple(
        Evaluation(rows=table, metrics=tuple(metrics.split()), on=f"{model}: {', '.join(same)}", layers=layers)
        for metrics, same in names.items()
    )


_AVERAGE = averages("COCO/results.json=cider", "...", "VizWiz/results.json=vqa")  # "Avg %", of all data sets


def _table_1() -> tuple[Evaluation, ...]:
    data = "COCO, MME C, MME P, NoCaps, POPE, SEED, VizWiz"
    found: tuple[Evaluation, ...] = ()
    for model, lines in _TABLE_1.items():
        found += _runs(tuple(Row(name, _method(name, model)) for name in lines), _NAMES[model], data)
    return found


def _table_2() -> tuple[Evaluation, ...]:
    table = [Row("Vanilla", "full")]
    for rate, lines in _TABLE_2.items():
        table += [Row(f"{name}, {rate:.0%}", _by_rate(rate, _INTERNVL)[name]) for name in lines]
    return _runs(tuple(table), "InternVL2-8B", "COCO, GQA, MME C, MME P, POPE, SQA, VizWiz", _INTERNVL)


def _windows() -> tuple[Row, ...]:
    at = [Row(f"layer {after}, w {w}", f"lightkv(layers=({{{after}}},),windows=({w},))")
          for after in (3, 14) for w in (1, 2, 4)]  # fmt: skip
    return Row("Vanilla", "full"), *at


def _table_9() -> tuple[Evaluation, ...]:
    table = (Row("Vanilla", "full"), *(Row(f"W=[{w}]", f"lightkv(windows=({w}))") for w in ("4,2,1", "6,4,2")))
    data = "COCO, DocVQA, GQA, MME C, MME P, NoCaps, POPE, SQA, SEED, VizWiz"
    return _runs(table, "LLaVA-v1.5-13B, LLaVA-NeXT-13B", data)


_EVE = (Row("Vanilla", "full"), Row("FastV", fastv(RATE, 32)), Row("LightKV", "lightkv"))
_QWEN_DATA = "COCO, GQA, MME C, MME P, NoCaps, POPE, SEED, VizWiz"
_QWEN_ORDER = ("FastV", "ToMe (P)", "PiToMe", "ToFu", "LightKV")
_QWEN = (Row("Vanilla", "full"), *(Row(name, _by_rate(RATE, 28)[name]) for name in _QWEN_ORDER))
_RATES = (
    Row("Vanilla", "full"),
    *(Row(f"{rate:.0%}", f"lightkv(rate={rate})") for rate in (0.55, 0.4, 0.3, 0.2)),
)
_LAYERS = (  # Fig. 6: one stage on LLaVA-NeXT-13B; its points and windows are not printed
    Row("Vanilla", "full"),
    *(Row(f"layer {n}", f"lightkv(layers=({{{n}}},),windows=(6,))") for n in (3, 5, 10, 15, 20, 25, 30, 35)),
)
_NO_DATA = "nothing to measure: it explains"
_COUNTED = "nothing: it is counted"

TABLES = [
    Item("LLaVA at 55 %", (*_table_1(), _AVERAGE, speed("lightkv-table-1"))),
    Item("InternVL2-8B", (*_table_2(), _AVERAGE, speed("lightkv-table-2"))),
    Item("EVE-7B", (*_runs(_EVE, "EVE-7B-v1, EVE-7B-v1-HD", "COCO, MME C, MME P, NoCaps, POPE, VizWiz"), _AVERAGE)),
    Item("time to the first token", (speed("lightkv-table-4"),), "an A100"),
    Item("window sizes", _runs(_windows(), "InternVL2-8B", "COCO, GQA, MME C, MME P, POPE, SQA, VizWiz", _INTERNVL)),
    Item("operations and bytes", (speed("lightkv-table-6"),), _COUNTED),
    Item("Qwen2.5-VL at 55 %", (*_runs(_QWEN, "Qwen2.5-VL-7B", _QWEN_DATA, 28), _AVERAGE)),
    Item("Qwen2.5-VL at four rates", (*_runs(_RATES, "Qwen2.5-VL-7B", _QWEN_DATA), _AVERAGE)),
    Item("windows on 13B", (*_table_9(), _AVERAGE)),
    Item("latency", (speed("lightkv-table-10"),), "an A100"),
]
FIGURES = [
    Item(
        "memory in prefill",
        tuple(Inspection(what="cost", policy=light(model), on=_NAMES[model]) for model in _TABLE_1),
        "an A100 for measured memory",
    ),
    Item("overview", (), _NO_DATA),
    Item("windows", (), _NO_DATA),
    Item("rates on Qwen2.5-VL", _runs(_RATES, "Qwen2.5-VL-7B", _QWEN_DATA)),
    Item("position of the method", (), _NO_DATA),
    Item("layers", _runs(_LAYERS, "LLaVA-NeXT-13B", _QWEN_DATA, 40)),
    Item(
        "survival",
        (Inspection(what="merged", policy=light("llava-1.5-13b"), samples=1, on="LLaVA-v1.5-13B: COCO"),),
    ),
]


# --- times, operations and bytes ------------------------------------------------------------------------------------


def _point(model: str, policy: Policy, new: int, **figures: float) -> Point:
    return Point(model, Setting(1, _VISION[_family(model)] + _TEXT, _TEXT, new), policy, figures)


def _counted_1() -> Iterator[Point]:
    for model, lines in _TABLE_1.items():
        for name, line in lines.items():
            if line is not None:
                yield _point(model, make(_method(name, model)), 100, teraflops=line[0], cache_gib=line[1])


def _counted_2() -> Iterator[Point]:
    setting = Setting(1, 7 * 256 + 74, 74, 100)
    yield Point("internvl2-8b", setting, make("full"), {"teraflops": 35.7, "cache_gib": 0.24})
    for rate, lines in _TABLE_2.items():
        texts = Evaluation(
            rows=tuple(Row(name, _by_rate(rate, _INTERNVL)[name]) for name in lines), layers=_INTERNVL
        ).at_depth(_INTERNVL)
        for row, (flops, size) in zip(texts.rows, lines.values(), strict=True):
            yield Point("internvl2-8b", setting, make(row.policy), {"teraflops": flops, "cache_gib": size})


def _timed_4() -> Iterator[Point]:
    for model, full, ours in (("llava-1.5-13b", 111, 84), ("llava-next-vicuna-13b", 386, 271)):
        yield _point(model, make("full"), 2, first_token_milliseconds=full)
        yield _point(model, make(light(model)), 2, first_token_milliseconds=ours)


def _counted_6() -> Iterator[Point]:
    for model, full, early, late in (
        ("llava-1.5-13b", (19.4, 0.55), (12.6, 0.37), (13.1, 0.38)),
        ("llava-next-vicuna-13b", (65.0, 1.75), (37.3, 1.05), (39.0, 1.09)),
    ):
        yield _point(model, make("full"), 100, teraflops=full[0], cache_gib=full[1])
        for layers, (flops, size) in (("15,23,31", early), ("17,24,31", late)):
            for windows in ("4,2,1", "6,4,2"):
                policy = make(light(model, windows, layers))
                yield _point(model, policy, 100, teraflops=flops, cache_gib=size)


def _timed_10() -> Iterator[Point]:
    names = ("Vanilla", "FastV", "PiToMe", "ToFu", "ToMe (P)", "LightKV")
    printed = {
        "llava-1.5-13b": ((111, 3.85), (77, 2.52), (82, 2.85), (81, 2.86), (81, 2.86), (84, 2.87)),
        "llava-1.5-7b": ((64, 3.00), (47, 1.70), (53, 2.14), (51, 2.13), (54, 2.10), (51, 2.11)),
        "llava-next-vicuna-13b": ((386, 4.17), (259, 2.94), (270, 3.29), (268, 3.28), (268, 3.28), (271, 3.31)),
        "llava-next-vicuna-7b": ((225, 3.20), (148, 1.83), (157, 2.26), (155, 2.24), (155, 2.23), (159, 2.24)),
    }
    for model, lines in printed.items():
        for name, (first, generation) in zip(names, lines, strict=True):
            figures: Figures = {"first_token_milliseconds": first, "mean_decode_seconds": generation}
            yield _point(model, make(_method(name, model)), 100, **figures)


_LENGTHS = "prompt lengths not given: 48 text and 576 or 2144 vision tokens give the paper's FLOPs and bytes"
_UNPADDED = "tower, all logits and 100 new tokens counted; the cache is what is kept, unpadded"
_EQ_9 = "Lambda counts the layers before, as in Eq. 9; the printed bytes fit one layer more, see docs/methods.md"
_MEAN = "means and standard deviations of 10 runs (Sec. 4.1)"
_A100 = "A100 (memory not given)"
SPEED = {
    "lightkv-table-1": SpeedTable(
        "LightKV, Table 1: operations and cache of LLaVA at 55 %", "counted, not timed", tuple(_counted_1()),
        (_LENGTHS, _UNPADDED, _EQ_9, "methods after prefill drop half and compute the whole prefill"), computed=True,
    ),
    "lightkv-table-2": SpeedTable(
        "LightKV, Table 2: operations and cache of InternVL2-8B", "counted, not timed", tuple(_counted_2()),
        ("prompt not given: the full cache's 0.24 GiB hold seven tiles and 74 text tokens",
         "Lambda not given: rate= is set so that 60 and 55 % of the vision tokens are left on average"),
        computed=True,
    ),
    "lightkv-table-4": SpeedTable(
        "LightKV, Table 4: time to the first token, LLaVA 13B", _A100, tuple(_timed_4()), rounds=10, notes=
        (TOWER, _LENGTHS, _MEAN, "windows 4, 2, 1, for NeXT 6, 4, 2; printed deviations 0.91, 0.72, 2.22 and 0.79 ms"),
    ),
    "lightkv-table-6": SpeedTable(
        "LightKV, Table 6: operations and cache, LLaVA 13B", "counted, not timed", tuple(_counted_6()),
        (_LENGTHS, _UNPADDED, _EQ_9), computed=True,
    ),
    "lightkv-table-10": SpeedTable(
        "LightKV, Table 10: first token, and 100 new tokens", _A100, tuple(_timed_10()), rounds=10, notes=
        (TOWER, _LENGTHS, _MEAN, "FastV leaves 55 % on average; the paper does not print its share"),
    ),
}  # fmt: skip
