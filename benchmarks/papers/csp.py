"""CSP: settings of its tables and figures. The budget is for all tokens.

The authors' script keeps 10 % heavy hitters and 10 % recent tokens. Here H2O, LOOK-M and CSP do so; SnapKV and RoCo
protect their own 32 and 10 last tokens, as the paper does not say how it sets them. Its RoCo ("ReCo") is described as
"temporal attention scores and robustness measures" of [31], which is our RoCo; the method of that name in its code is
another one. Appendix A.1 prints the share of
the self list of each task ("ratio = 1 for only self-attention", Sec. 5.1), so `c`, the share of the cross list, is
1 - ratio; its text adds three data sets. Sec. 4.3 has a bias of 1.5 on SlideVQA; the bias of EgocentricNavigation is
missing in our copy of the paper.
"""

from __future__ import annotations

import dataclasses

from benchmarks.milebench import TASKS
from benchmarks.papers.commands import OUT, Evaluation, Inspection, Item, Row, Run, Script, rows, speed
from benchmarks.papers.points import Point, SpeedTable
from vlkv import policies
from vlkv.tools.benching.settings import Setting

KEEP = 0.2
_NO_DATA = "nothing to measure: it lists"
_MILEBENCH = "the checkpoint and MileBench: python -m benchmarks.milebench makes the questions"
_ONE = rows(Full_Cache="full", H2O="h2o", SnapKV="snapkv", ReCo="roco")
_LOOKM = tuple(
    Row(f"LOOK-M ({prior}{name}-Merge)", f"lookm(merging='{merging}',text_prior={prior != ''})")
    for prior in ("", "TP+")
    for name, merging in (("A", "average"), ("W", "weighted"), ("P", "pivot"))
)


def _csp(c: float, options: str = "") -> Row:
    return Row("CSP (Ours)", f"csp(c={c}{options})")


# By model: data sets of MileBench with another c than 0.5, or another bias.
_CROSS, _OWN = "Spot-the-Diff WebQA", "ActionPrediction"
_SETTINGS = {
    "LLaVA-v1.5-7b": (
        (_csp(0.9), f"{_CROSS} {TASKS['T-4']}"), (_csp(0.0), _OWN), (_csp(0.1), TASKS["IR"]),
        (_csp(0.5, ",recent_bias=1.5"), "SlideVQA"),
    ),
    "LLaVA-v1.5-13b": (
        (_csp(0.9), _CROSS), (_csp(0.0), TASKS["T-1"]), (_csp(0.1), TASKS["IR"]),
        (_csp(0.5, ",recent_bias=1.5"), "SlideVQA"),
    ),
}  # fmt: skip


def _milebench(table: tuple[Row, ...], on: str) -> Evaluation:
    """The metrics are those of MileBench, which `benchmarks.milebench --score` computes."""
    return Evaluation(rows=table, keeps=(KEEP,), metrics=("exact", "rouge-l"), scope="all", on=on)


_SCORES = Script(words=["python", "-m", "benchmarks.milebench", "--score", "DATA.jsonl", f"{OUT}/results.json"])
# "the maximum context length was configured to 4096 tokens" (Sec. 4.3)
_QUESTIONS = Script(words=[
    "python", "-m", "benchmarks.milebench", "MILEBENCH", "DATA.jsonl", "--context", "4096", "--model", "MODEL",
])  # fmt: skip


def _main() -> tuple[Run, ...]:
    """A run for each setting of CSP, as it is the same for the data sets of a task."""
    runs: list[Run] = []
    for model, settings in _SETTINGS.items():
        special = " ".join(names for _, names in settings).split()
        rest = " ".join(name for names in TASKS.values() for name in names.split() if name not in special)
        for row, names in ((_csp(0.5), rest), *settings):
            runs.append(_milebench((*_ONE, *_LOOKM, row), f"{model}: {', '.join(names.split())}"))
    return _QUESTIONS, *runs, _SCORES


_SHARES = tuple(Row(f"{ratio}", f"csp(c={1 - ratio:.3g})") for ratio in (0.0, 0.1, 0.5, 0.9, 1.0))
_SOFTMAX = (
    Row("selection, n-Softmax", "csp"),
    Row("selection, Softmax", "csp(score_n=0,decode_n=0)"),
    Row("overall, n-Softmax", "csp(regions=False)"),
    Row("overall, Softmax", "csp(regions=False,score_n=0,decode_n=0)"),
)
_ARCHITECTURES = (
    *_ONE[:3], Row("RoCo", "roco"), Row("LOOK-M", "lookm"), _csp(0.5)
)  # fmt: skip

TABLES = [
    Item("MileBench", _main(), _MILEBENCH),
    Item("latency and memory", (speed("csp-table-2"),), "an RTX 4090, and samples of ALFRED"),
    Item(
        "InternVL and MobileVLM",
        (_QUESTIONS, _milebench(_ARCHITECTURES, "InternVL-v1.5-7B, MobileVLM-V2-3B: T-2, T-4, S-4, IR"), _SCORES),
        _MILEBENCH,
    ),
    Item(
        "ratios by task",
        (_QUESTIONS, _milebench(_SHARES, "LLaVA-v1.5-7b, LLaVA-v1.5-13b: each task"), _SCORES),
        _MILEBENCH,
    ),
    Item("the data sets", (), _NO_DATA),
]
FIGURES = [
    Item(
        "self and cross attention",
        tuple(
            Inspection(what=what, policy="csp", keep=KEEP, on="LLaVA-v1.5-7b") for what in ("densities", "divergence")
        ),
    ),
    Item("overview", (), _NO_DATA),
    Item("ratios", (_QUESTIONS, _milebench(_SHARES, "LLaVA-v1.5-7b: each data set"), _SCORES), _MILEBENCH),
    Item(
        "n-softmax and regions", (_QUESTIONS, _milebench(_SOFTMAX, "LLaVA-v1.5-7b: each data set"), _SCORES), _MILEBENCH
    ),
    Item(
        "budgets",
        (
            _QUESTIONS,
            dataclasses.replace(_milebench(_ARCHITECTURES, "LLaVA-v1.5-7b: each data set"), keeps=(0.1, 0.2, 0.3, 0.6)),
            _SCORES,
        ),
        _MILEBENCH,
    ),
    Item("densities", (Inspection(what="densities", policy="csp", keep=KEEP),)),
    Item("divergence by data set", (Inspection(what="divergence", policy="csp", keep=KEEP),)),
]
_AT = Setting(1, 3217, 65, 128)
SPEED = {
    "csp-table-2": SpeedTable(
        "CSP, Table 2: LLaVA-1.5-7B on samples of ALFRED",
        "RTX 4090",
        tuple(
            Point("llava-1.5-7b", _AT, policy, {"step_milliseconds": step, "cache_gib": size})
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
    ),
}
