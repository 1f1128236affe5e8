"""AirCache: settings of its tables and figures. Every method evicts vision tokens only (Sec. 4.1, App. B)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.commands import (
    DATA,
    JUDGE,
    OUT,
    PROFILE,
    Evaluation,
    Inspection,
    Item,
    Profile,
    Row,
    Run,
    Script,
    averages,
    rows,
    speed,
)
from benchmarks.papers.points import TOWER, Point, SpeedTable
from vlkv import policies
from vlkv.tools.benching.settings import Setting

# Sec. 4.1. App. B: Elastic Cache without merging, which makes these models repeat themselves. "For most methods, we
# adhere to their initial setup": PrefixKV with an offline profile. SnapKV observes with text tokens alone.
RIVALS = rows(
    Full="full", H2O="h2o", Elastic="elasticcache(merging='none')", PrefixKV=f"prefixkv(profile='{PROFILE}')",
    SnapKV="snapkv(observers='text')", Ours="aircache",
)  # fmt: skip
MAIN = (0.5, 0.1, 0.05, 0.01)
SHORT = (0.5, 0.1, 0.01)
_VQA = "ChatQA, InfoVQA, DocVQA, TextVQA"
_LLAVA = "LLaVA-OneVision-7B"


def _vqa(table: tuple[Row, ...], keeps: tuple[float, ...], models: str = _LLAVA, data: str = _VQA) -> Evaluation:
    """VQA by ANLS (Sec. 4.1)."""
    return Evaluation(rows=table, keeps=keeps, metrics=("anls",), scope="vision", on=f"{models}: {data}")


def _compared(keeps: tuple[float, ...], *runs: Run) -> tuple[Run, ...]:
    """Runs of `RIVALS`, after PrefixKV's profile."""
    return Profile(keeps=keeps, options=("--scope", "vision")), *runs


def _others(table: tuple[Row, ...]) -> tuple[Evaluation, ...]:
    """Multiple choice by accuracy, judgment by MME's score, and video by a judge (Sec. 4.1)."""
    return (
        Evaluation(rows=table, keeps=SHORT, metrics=("exact",), scope="vision", on=f"{_LLAVA}: MMBench-EN"),
        Evaluation(rows=table, keeps=SHORT, metrics=("mme",), scope="vision", on=f"{_LLAVA}: MME"),
        _video(table),
    )


def _video(table: tuple[Row, ...], model: str = "LLaVA-Video-7B") -> Evaluation:
    return Evaluation(rows=table, keeps=SHORT, metrics=(), scope="vision", judged=True, on=f"{model}: MMBench-Video")


def _one_token(data: str) -> Evaluation:
    """The answers if a single vision token is left, by the place of the token in the ranking (Sec. 4.3)."""
    places = [f"place={place}" for place in (1, 2, 5)]
    places += [f"share={share}" for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)]
    only = "benchmarks.papers.one_token:OneToken"
    table = [Row("none", f"{only}(place=0)")]
    for name, policy in RIVALS[1:]:
        method = "prefixkv" if name == "PrefixKV" else policy  # ranks; the profile would only divide budgets
        table += [Row(f"{name}, {place}", f"{only}(method={method!r},{place})") for place in places]
    return Evaluation(rows=tuple(table), metrics=("anls",), on=f"{_LLAVA}: {data}")


_PRUNED = (  # Table 4 does not print the shares of IVTP's two stages: each keeps the square root
    *rows(Full="full", FastV="fastv", FasterVLM="fastervlm"),
    *(Row("IVTP", f"ivtp(keep={keep},groups={keep**0.5:.3g})") for keep in SHORT),
    Row("Ours", "aircache"),
)
_PARTS = (
    Row("Continuous window (16)", "aircache(window='recent',rows=16)"),
    Row("Continuous window (32)", "aircache(window='recent',rows=32)"),
    Row("All text tokens", "aircache(window='text')"),
    Row("Visual window (32)", "aircache(window='vision',rows=32)"),
    Row("Average allocation", "aircache(allocation='uniform')"),
    Row("Pyramid allocation", "aircache(allocation='pyramid')"),
    Row("Only w/ s_t", "aircache(allocation='strength')"),
    Row("Only w/ s_k", "aircache(allocation='skewness')"),
    Row("Ours", "aircache"),
)
_EVERYTHING = (
    Row("H2O*", "h2o(scope='all')"),
    Row("H2O", "h2o(scope='vision')"),
    Row("Ours*", "aircache(scope='all')"),
    Row("Ours", "aircache(scope='vision')"),
)
_MERGING = tuple(Row(f"{share:.0%}", f"aircache(merging={share})") for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0))
_ALPHA = tuple(Row(f"{a}", f"aircache(alpha={a})") for a in (0.99, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6))
_EXAMPLE = tuple(row for row in RIVALS if row.name in ("Full", "H2O", "Elastic", "Ours"))
_NO_DATA = "nothing to measure: it explains"

TABLES = [
    Item("VQA, three models", _compared(MAIN, _vqa(RIVALS, MAIN, f"{_LLAVA}, InternVL2-8B, Qwen2-VL-7B"))),
    Item(
        "multiple choice, judgment, video",
        _compared(SHORT, *_others(RIVALS)),
        "the checkpoints, the data sets as JSONL, and a judge",
    ),
    Item("latency and throughput", (speed("aircache-table-3"),), "an A100 80 GB"),
    Item(
        "token pruning",
        (_vqa(_PRUNED, SHORT, data="ChatQA"), *_others(_PRUNED), speed("aircache-table-4")),
        "the checkpoints, the data sets as JSONL, a judge, and an A100 80 GB",
    ),
    Item("components", (_vqa(_PARTS, (0.01,)),)),
    Item(
        "unified compression (starred)",
        (
            _vqa(_EVERYTHING, MAIN, data="ChatQA"),
            averages("--lengths", f"{OUT}/results.json"),
            speed("aircache-table-6"),
        ),
    ),
    Item(
        "numbers of tokens",
        (
            Script(
                words=["python", "-m", "benchmarks.papers.tokens", "DATA.jsonl", "--model", "MODEL"],
                on=f"{_LLAVA}, InternVL2-8B, Qwen2-VL-7B: {_VQA}",
            ),
        ),
    ),
    Item("VQA, sizes of InternVL2", _compared(MAIN, _vqa(RIVALS, MAIN, "InternVL2-1B, InternVL2-4B, InternVL2-26B"))),
    Item("latency on InternVL2 and Qwen2-VL", (speed("aircache-table-9"),), "an A100 80 GB"),
    Item(
        "MMBench-Video in detail",
        _compared(
            SHORT, _video(RIVALS, _LLAVA), averages("--by-dataset", DATA, f"{OUT}/results.json", "--judge", JUDGE)
        ),
        'the checkpoint, a judge, and the data set as JSONL, with the nine categories as "dataset"',
    ),
    Item("merging", (_vqa(_MERGING, (0.1, 0.01)),)),
    Item("relevance threshold", (_vqa(_ALPHA, (0.1, 0.01)),)),
    Item(
        "divergence of budgets",
        tuple(
            Inspection(what="divergence", policy="aircache", keep=keep, on=f"{_LLAVA}: {_VQA}") for keep in (0.1, 0.01)
        ),
    ),
]
FIGURES = [
    Item(
        "attention while decoding, consistency of observers",
        (
            Inspection(what="patches", samples=1, on=_LLAVA),
            Inspection(what="observers", policy="aircache", keep=0.1, samples=1, on=_LLAVA),
        ),
    ),
    Item("overview", (), _NO_DATA),
    Item(
        "strength, one token, skewness",
        (Inspection(what="strength", policy="aircache", keep=0.1, on=f"{_LLAVA}: ChatQA"), _one_token("ChatQA")),
    ),
    Item("one token, ChatQA and TextVQA", (_one_token("ChatQA, TextVQA"),)),
    Item("one token, InfoVQA and DocVQA", (_one_token("InfoVQA, DocVQA"),)),
    *[
        Item(
            f"an answer as an example, {n}",
            (Evaluation(rows=_EXAMPLE, keeps=(0.01,), scope="vision", on=_LLAVA, new_tokens=256),),
            "the checkpoint and the picture",
        )
        for n in range(6, 10)
    ],
]

# --- times ----------------------------------------------------------------------------------------------------------

_A100 = "A100 80 GB"


def _speed(model: str, batch: int, kilo: int, *figures: float) -> Iterator[Point]:
    """Points of one row: prefill full, AirCache; decoding full, 50 %, 10 %; throughput full, 50 %, 10 %."""
    setting = Setting(batch, 1024 * kilo, 64, 512)
    full, ours, *rest = figures
    for i, policy in enumerate([policies.Full(), *(policies.AirCache(keep=keep) for keep in (0.5, 0.1))]):
        printed = {"prefill_seconds": ours if i else full, "decode_seconds": rest[i], "tokens_per_second": rest[3 + i]}
        yield Point(model, setting, policy, printed)


_AIRCACHE_3 = SpeedTable(
    "AirCache, Table 3: LLaVA-OneVision-7B, 512 new tokens, 64 of the prompt text",
    _A100,
    (
        *_speed("llava-onevision-7b", 8, 2, 1.6, 1.8, 11.6, 9.4, 8.2, 353, 436, 500),
        *_speed("llava-onevision-7b", 8, 8, 4.9, 5.3, 15.0, 11.9, 9.4, 273, 344, 436),
        *_speed("llava-onevision-7b", 8, 16, 11.3, 11.9, 21.7, 15.0, 10.4, 189, 273, 394),
        *_speed("llava-onevision-7b", 8, 32, 25.2, 26.4, 35.9, 22.0, 12.3, 114, 186, 333),
        *_speed("llava-onevision-7b", 16, 2, 2.3, 2.5, 14.4, 11.2, 9.7, 569, 731, 845),
        *_speed("llava-onevision-7b", 16, 8, 9.4, 9.8, 22.6, 15.6, 11.8, 362, 525, 694),
        *_speed("llava-onevision-7b", 16, 16, 20.3, 21.4, 36.9, 23.0, 12.8, 222, 356, 640),
    ),
    (
        TOWER,
        "the table names no model: the paper's main model is used, because Table 9 has the two others",
        'the paper prints one prefill time for "ours": it is shown for both shares',
    ),
)
_AT_4 = Setting(16, 8 * 1024, 64, 512)
_AIRCACHE_4 = SpeedTable(
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
        TOWER,
        "LLaVA-OneVision's tower has no class token: FasterVLM ranks by the tower's mean attention, here 0",
        "the shares of IVTP's two stages are not given: here each keeps the square root of 10 %",
    ),
)
_AIRCACHE_6 = SpeedTable(
    "AirCache, Table 6: LLaVA-OneVision-7B, eviction among all tokens (starred rows) or vision tokens alone",
    _A100,
    tuple(
        Point("llava-onevision-7b", Setting(1, 4763 + 47, 47, 512), make(keep), {"total_seconds": time})
        for make, seconds in (
            (lambda keep: policies.H2O(keep=keep, scope="all"), (407, 559, 733, 1048)),
            (lambda keep: policies.H2O(keep=keep, scope="vision"), (323, 251, 239, 215)),
            (lambda keep: policies.AirCache(keep=keep, scope="all"), (374, 530, 688, 963)),
            (lambda keep: policies.AirCache(keep=keep), (306, 235, 221, 207)),
        )
        for keep, time in zip((0.5, 0.1, 0.05, 0.01), seconds, strict=True)
    ),
    (
        TOWER,
        "the paper's seconds are for a whole benchmark, ChatQA by its accuracies, with 4763 + 47 tokens (Table 7): "
        "compare rows only with each other",
        "starred rows take longer in the paper because the answers get longer: here all have 512 tokens; "
        "python -m benchmarks.papers.averages --lengths counts words of answers",
    ),
)
_AIRCACHE_9 = SpeedTable(
    "AirCache, Table 9: InternVL2-8B and Qwen2-VL-7B, 512 new tokens, 64 of the prompt text",
    _A100,
    (
        *_speed("internvl2-8b", 8, 2, 1.2, 1.4, 9.3, 7.0, 5.9, 440, 585, 694),
        *_speed("internvl2-8b", 8, 8, 4.6, 5.0, 13.3, 10.5, 8.8, 308, 390, 465),
        *_speed("internvl2-8b", 8, 16, 9.8, 10.5, 24.8, 15.7, 11.9, 165, 261, 344),
        *_speed("internvl2-8b", 8, 32, 23.8, 24.8, 46.2, 28.1, 18.2, 89, 146, 225),
        *_speed("internvl2-8b", 16, 2, 2.5, 2.7, 12.2, 7.4, 6.0, 671, 1107, 1365),
        *_speed("internvl2-8b", 16, 8, 9.9, 10.6, 21.6, 12.9, 8.9, 379, 635, 920),
        *_speed("internvl2-8b", 16, 16, 21.6, 22.4, 28.5, 16.2, 10.0, 287, 506, 819),
        *_speed("qwen2-vl-7b", 8, 2, 1.1, 1.3, 8.4, 6.6, 5.2, 488, 621, 788),
        *_speed("qwen2-vl-7b", 8, 8, 4.3, 4.7, 12.6, 9.7, 8.1, 325, 422, 506),
        *_speed("qwen2-vl-7b", 8, 16, 9.4, 10.2, 23.7, 14.9, 11.2, 173, 275, 366),
        *_speed("qwen2-vl-7b", 8, 32, 22.7, 24.0, 45.0, 26.2, 14.6, 91, 156, 214),
        *_speed("qwen2-vl-7b", 16, 2, 2.1, 2.3, 10.1, 6.8, 5.2, 811, 1205, 1575),
        *_speed("qwen2-vl-7b", 16, 8, 8.6, 9.2, 19.7, 12.1, 8.4, 426, 677, 975),
        *_speed("qwen2-vl-7b", 16, 16, 19.2, 20.1, 27.0, 15.6, 9.7, 303, 525, 845),
    ),
    (
        TOWER,
        "214 token/s of Qwen2-VL-7B at 8 x 32k is as printed, but 14.6 s would give 281",
        "InternVL2-8B, batch 16: two rows say 16k in our copy of the table; the first is taken as 8k",
    ),
)
SPEED = {
    "aircache-table-3": _AIRCACHE_3,
    "aircache-table-4": _AIRCACHE_4,
    "aircache-table-6": _AIRCACHE_6,
    "aircache-table-9": _AIRCACHE_9,
}
