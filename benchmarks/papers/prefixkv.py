"""PrefixKV: settings of its tables and figures. The budget is for all tokens.

The main setting is a profile from ten random samples of the model's training set (Sec. 4.1), SAMPLES.jsonl: other
questions than those that are evaluated. The baseline of Sec. 4.3
keeps the same number of entries in every layer, by the same scores and without merging; "Pyramid" is this baseline with
PyramidKV's budgets, also in Tables 1 and 2, whose numbers for MM-Vet are those of Table 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.commands import (
    OUT,
    Evaluation,
    Inspection,
    Item,
    Profile,
    Row,
    Run,
    Script,
    rows,
    speed,
)  # fmt: skip
from benchmarks.papers.points import TOWER, Point, SpeedTable
from vlkv import policies
from vlkv.tools.benching.settings import Setting

NINE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_NEW = 1024  # references of LLaVA-Description and MM-Vet have hundreds of tokens
_BASELINE = "elasticcache(merging='none')"
_PYRAMID = f"compose({_BASELINE}, allocate=pyramidkv)"


def profiled(file: str = "PROFILE.json", options: str = "") -> str:
    """PrefixKV with the budgets of a profile."""
    return f"prefixkv(profile='{file}'{options})"


_FULL, _LOCAL, _H2O, _ELASTIC, _OURS = rows(
    Full="full", Local="streamingllm(evict=True)", H2O="h2o", Elastic="elasticcache", Ours=profiled()
)
_PYRAMID_ROW = Row("Pyramid", _PYRAMID)
SIX = (_FULL, _LOCAL, _H2O, _PYRAMID_ROW, _ELASTIC, _OURS)
FIVE = (_FULL, _LOCAL, _H2O, _ELASTIC, _OURS)


def _quality(table: tuple[Row, ...], on: str, *, keeps: tuple[float, ...] = NINE, rouge: bool = False) -> Evaluation:
    """Perplexity of the reference, and in Tables 1 and 2 ROUGE-L against the answer of the full cache."""
    metrics = ("perplexity", "self-rouge-l") if rouge else ("perplexity",)
    return Evaluation(rows=table, keeps=keeps, metrics=metrics, scope="all", on=on, new_tokens=_NEW)


def _offline(
    table: tuple[Row, ...], on: str, *, keeps: tuple[float, ...] = NINE, rouge: bool = False
) -> tuple[Run, ...]:
    """A profile from ten samples, then the table."""
    return Profile(keeps=keeps, on=on.partition(":")[0]), _quality(table, on, keeps=keeps, rouge=rouge)


def _main(data: str) -> tuple[Run, ...]:
    return (
        *_offline(SIX, f"LLaVA-1.5-7B: {data}", rouge=True),
        *_offline(FIVE, f"LLaVA-1.5-13B: {data}", rouge=True),
    )


def _several(names: dict[str, Profile]) -> tuple[Run, ...]:
    """A profile for each row, then the table."""
    table = tuple(Row(name, profiled(each.out)) for name, each in names.items())
    keeps = next(iter(names.values())).keeps
    return *names.values(), _quality(table, _VET, keeps=keeps)


_VET = "LLaVA-1.5-7B: MM-Vet"
_HALF = (0.5,)
_NUMBERS = {f"{n}": Profile(keeps=NINE, samples=n, out=f"PROFILE-{n}.json") for n in (1, 5, 10, 20)}
_DOMAINS = {
    name: Profile(keeps=NINE, data=f"{name}.jsonl", out=f"PROFILE-{name}.json") for name in ("VQA", "OCR", "reasoning")
}
_LENGTHS = {
    name: Profile(keeps=NINE, data=f"{file}.jsonl", out=f"PROFILE-{file}.json")
    for name, file in (("(0, 100]", "short"), ("(100, 500]", "medium"), ("(500, inf]", "long"))
}
_DELTAS = {
    f"{delta}": Profile(keeps=_HALF, options=("--tolerance", f"{delta}"), out=f"PROFILE-delta-{delta}.json")
    for delta in (0.0125, 0.025, 0.05, 0.075, 0.1)
}
_STEPS = {
    f"{steps}": Profile(keeps=_HALF, options=("--steps", f"{steps}"), out=f"PROFILE-steps-{steps}.json")
    for steps in range(7, 13)
}
_LONG = rows(
    Base="full", Local="streamingllm(budget=128,evict=True)", H2O="h2o(budget=128)", Pyramid="pyramidkv(budget=128)",
    Ours=profiled(options=",budget=128"),
)  # fmt: skip
_LONG_KEEP = 0.016  # 128 of the 8192 tokens of the model
# LongBench's limits on the answer, and its data sets: LongBench/config/dataset2maxlen.json of its commit 2e00731.
_LIMITS = {
    32: "hotpotqa, 2wikimqa, musique, triviaqa, passage_retrieval_en, passage_count",
    64: "multifieldqa_en, trec, lcc, repobench-p",
    128: "narrativeqa, qasper, samsum",
    512: "gov_report, qmsum, multi_news",
}
# 2, 4 and 8 of 16 bits; the product of 4 bits and an eighth of the entries is 3.125 %.
_QUANTISED = (
    Row("Full", "full"),
    *(Row(f"KIVI {share}", f"kivi(bits={bits},window=128)") for share, bits in (("12.5%", 2), ("25%", 4), ("50%", 8))),
    *(Row(f"Ours {keep:.4g}", profiled(options=f",keep={keep}")) for keep in (0.125, 0.25, 0.5)),
    Row("KIVI and ours, 3.125%", f"compose({profiled(options=',keep=0.125')}, store=kivi(bits=4,window=128))"),
)
_LLAMA = "LLaMA-3-8B"
_LONG_MISSING = "the checkpoint and LongBench: python -m benchmarks.longbench makes the questions"


def _longbench(table: tuple[Row, ...], keeps: tuple[float, ...]) -> tuple[Run, ...]:
    """A profile, then for each limit on the answer a file of questions with its answers and scores."""
    runs: list[Run] = [Profile(keeps=keeps)]
    for limit, names in _LIMITS.items():
        data, on = f"limit-{limit}.jsonl", f"{_LLAMA}: {names}"
        runs += [
            Evaluation(rows=table, metrics=("f1", "rouge-l"), scope="all", on=on, new_tokens=limit, data=data),
            Script(words=["python", "-m", "benchmarks.longbench", "--score", data, f"{OUT}/results.json"]),
        ]
    return tuple(runs)


TABLES = [
    Item(
        "LLaVA-Description",
        _main("LLaVA-Description"),
        "the model tuned again without LLaVA-Description (Sec. 4.1), and the data sets as JSONL",
    ),
    Item("MM-Vet", _main("MM-Vet")),
    Item("inference time", (speed("prefixkv-table-3"),), "an A100"),
    Item(
        "prefix configuration",
        _offline((Row("Baseline", _BASELINE), _PYRAMID_ROW, Row("PrefixKV", profiled())), _VET),
    ),
    Item("number of samples", _several(_NUMBERS)),
    Item("offline estimation", _offline((Row("Offline", profiled()), Row("Online", "prefixkv")), _VET)),
    Item(
        "deviations",
        (
            Profile(keeps=NINE, on="LLaVA-1.5-7B"),
            Profile(
                keeps=NINE,
                samples=None,
                data="DATA.jsonl",
                options=("--compare", "PROFILE.json"),
                out="ALL.json",
                on=_VET,
            ),
        ),
    ),
    Item("robustness to domain", _several(_DOMAINS)),
    Item("instruction complexity", _several(_LENGTHS)),
    Item("robustness to delta", _several(_DELTAS)),
    Item("robustness to steps", _several(_STEPS)),
    Item(
        "merging",
        _offline(
            (
                Row("PrefixKV", profiled()),
                Row("Position", profiled(options=",merging='position'")),
                Row("Feature", profiled(options=",merging='cosine'")),
            ),
            _VET,
        ),
    ),
    Item("Qwen-VL", _offline(FIVE, "Qwen-VL: MM-Vet")),
    Item(
        "LongBench and needles",
        (
            *_longbench(_LONG, (_LONG_KEEP,)),
            Evaluation(rows=_LONG, metrics=("needle",), scope="all", on=f"{_LLAMA}: needles", data="needles.jsonl"),
        ),
        _LONG_MISSING,
    ),
    Item(
        "with quantisation",
        _longbench(_QUANTISED, (0.125, 0.25, 0.5)),
        _LONG_MISSING,
    ),
    Item(
        "several rounds, long text",
        _offline(FIVE, "LLaVA-1.5-7B: multi-round, long text", keeps=_HALF),
        "the checkpoint and the data, which was not released",
    ),
    Item("high resolution", _offline(FIVE, "LLaVA-NeXT-7B: MM-Vet", keeps=_HALF)),
    *[
        Item(
            f"an answer as an example, {n}",
            (
                Profile(keeps=(0.2,)),
                Evaluation(rows=FIVE[1:], keeps=(0.2,), scope="all", new_tokens=512, on="LLaVA-1.5-7B"),
            ),
            "the checkpoint and the picture",
        )
        for n in range(18, 23)
    ],
]
FIGURES = [
    Item("comparison", (), "nothing to measure: it explains"),
    Item("Lorenz curves", (Inspection(what="lorenz", policy="prefixkv", keep=0.5),)),
    Item("overview", (), "nothing to measure: it explains"),
    Item(
        "budgets and Gini coefficients of 100 samples",
        tuple(
            Inspection(what=what, policy="prefixkv", keep=0.5, samples=100, on="LLaVA-1.5-7B")
            for what in ("budgets", "lorenz")
        ),
    ),
    Item(
        "error of features",
        (
            Profile(keeps=_HALF),
            *(
                Inspection(what="error", policy=row.policy, keep=0.5, samples=100, on="LLaVA-1.5-7B")
                for row in FIVE[1:]
            ),
        ),
    ),
    Item("budgets on Qwen-VL", (Inspection(what="budgets", policy="prefixkv", keep=0.5, samples=10, on="Qwen-VL"),)),
]


def _speed(model: str, batch: int, prompt: int, new: int, *latency: float, speed: tuple[float, ...]) -> Iterator[Point]:
    """Points of one row: seconds and tokens per second at 20, 40, 60, 80 % and full, until memory ran out."""
    shares = (0.2, 0.4, 0.6, 0.8)
    # As offline: no search. The profile is not printed; equal shares take as long.
    contestants = [policies.Full(), *(policies.PrefixKV(keep=keep, profile=(1.0,)) for keep in shares)]
    seconds, speeds = dict(zip((*shares, 1.0), latency, strict=False)), dict(zip(shares, speed, strict=False))
    for policy in contestants:
        printed = {
            "total_seconds": seconds.get(policy.keep or 1.0),
            "total_tokens_per_second": speeds.get(policy.keep or 1.0),
        }
        figures = {name: figure for name, figure in printed.items() if figure is not None}
        yield Point(model, Setting(batch, prompt, prompt - 576, new), policy, figures)


_PREFIXKV_3 = SpeedTable(
    "PrefixKV, Table 3: LLaVA-1.5, one image",
    "A100 (memory not given)",
    (
        *_speed("llava-1.5-13b", 8, 1024, 512, 20.0, 24.3, 27.5, 29.7, 30.5, speed=(204.6, 168.1, 148.7, 137.6)),
        *_speed("llava-1.5-13b", 16, 624, 256, 11.7, 14.2, 15.9, 17.3, 17.8, speed=(349.5, 288.0, 256.3, 236.5)),
        *_speed("llava-1.5-7b", 16, 1024, 512, 16.8, 22.5, 26.6, 29.5, 30.7, speed=(486.7, 363.3, 307.9, 276.9)),
        *_speed("llava-1.5-7b", 48, 624, 256, 13.1, speed=(934.4,)),
    ),
    (
        TOWER,
        "offline, without a search (Sec. 4.3); the profile is not printed: here equal shares, which take as long",
        "seconds are of prefill and decoding together; at batch 48 all but 20 % ran out of memory",
        "the full cache's throughput is not in our copy of the table",
    ),
)
SPEED = {"prefixkv-table-3": _PREFIXKV_3}
