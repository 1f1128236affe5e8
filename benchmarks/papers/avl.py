"""A-VL: settings of its tables and figures.

S, C, K, P and T are percentages and steps (Table 1). Table 2 keeps 50 % with every method: FastV of the vision tokens,
H2O of all tokens with 75 % recent ones, and A-VL with the setting of Table 3 whose numbers Table 2 repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.papers.commands import Evaluation, Inspection, Item, Row, Script, rows, speed
from benchmarks.papers.points import Point, SpeedTable
from vlkv import policies
from vlkv.tools.benching.settings import Setting

_LONGEST_TEXT = 96  # "maximum text token length", not printed: nearest to Table 3's megabytes, see docs/methods.md
_ANSWER = 5  # tokens of an answer, not printed: one refresh step in five gives Table 3's used cache


class Setting3(NamedTuple):
    """A line of Table 3; None: not used."""

    stored: int  # S
    core: int | None = None  # C
    refresh: int | None = None  # K
    prefill: int | None = None  # P
    text: int | None = None  # T

    @property
    def policy(self) -> policies.AVL:
        """The policy of this line."""
        core, prefill, text = (None if x is None else x / 100 for x in (self.core, self.prefill, self.text))
        return policies.AVL(
            keep=self.stored / 100, core=core, refresh=self.refresh or 3, text=text,
            longest_text=None if text is None else _LONGEST_TEXT, prefill=prefill,
        )  # fmt: skip

    @property
    def row(self) -> Row:
        """The row of Table 3."""
        return Row(" ".join("-" if x is None else str(x) for x in self), policies.text_of(self.policy))


_40, _40_30 = Setting3(40), Setting3(40, 30, 3)
_45_30, _45_30_90 = Setting3(45, 30, 3), Setting3(45, 30, 3, 90)
_45_30_90_50, _45_30_90_60, _45_30_90_70 = (Setting3(45, 30, 3, 90, text) for text in (50, 60, 70))
# By model of Table 3: preset, numbers of vision and other tokens (from the megabytes of the full cache), these
# megabytes, and the lines with their stored and used percent and their megabytes.
_TABLE_3 = {
    "LLaVA 1.5 7B": ("llava-1.5-7b", 576, 70, 339, {
        _40: (46, 46, 156), _40_30: (46, 39, 156), _45_30_90: (50, 40, 170), _45_30_90_50: (48, 38, 163)}),
    "LLaVA 1.5 13B": ("llava-1.5-13b", 576, 70, 529, {
        _40: (46, 46, 243), _45_30: (50, 40, 265), _45_30_90: (50, 40, 265), _45_30_90_60: (48, 38, 254)}),
    "LLaVA 1.6 7B": ("llava-next-vicuna-7b", 2144, 105, 1179, {
        _40: (43, 43, 507), _45_30_90: (47, 36, 554), _45_30_90_70: (45, 35, 531)}),
    "LLaVA 1.6 13B": ("llava-next-vicuna-13b", 2144, 105, 1841, {
        _40: (43, 43, 792), _45_30_90: (47, 36, 865), _45_30_90_70: (45, 35, 828)}),
}  # fmt: skip
_METRICS = {  # Sec. "Evaluation Setup"
    "DocVQA": "anls", "TextVQA": "vqa", "OCRBench": "ocrbench", "Nocaps": "cider", "Flickr30k": "cider", "VQAv2": "vqa",
}  # fmt: skip
_RIVALS = rows(Original="full", FastV="fastv(keep=0.5)", H2O="h2o(keep=0.5,recent=0.75,scope='all')")
# The setting of "Our" in Table 2, by the data sets whose number it is in Table 3. Table 3 has no Flickr30k and VQAv2,
# and no Qwen-VL: these take the model's first setting, and Qwen-VL that of LLaVA 1.5 7B.
_TABLE_2 = {
    "LLaVA 1.5 7B, Qwen-VL": {_40: tuple(_METRICS)},
    "LLaVA 1.5 13B": {_45_30: tuple(_METRICS)},
    "LLaVA 1.6 7B": {
        _45_30_90: ("DocVQA",), _45_30_90_70: ("TextVQA", "OCRBench"), _40: ("Nocaps", "Flickr30k", "VQAv2"),
    },
    "LLaVA 1.6 13B": {_40: tuple(_METRICS)},
}  # fmt: skip


def _runs(table: tuple[Row, ...], model: str, data: tuple[str, ...]) -> tuple[Evaluation, ...]:
    """A run for each metric of these data sets."""
    names: dict[str, list[str]] = {}
    for name in data:
        names.setdefault(_METRICS[name], []).append(name)
    return tuple(
        Evaluation(rows=table, metrics=(metric,), on=f"{model}: {', '.join(same)}") for metric, same in names.items()
    )


def _table_2() -> tuple[Evaluation, ...]:
    found: tuple[Evaluation, ...] = ()
    for model, settings in _TABLE_2.items():
        for setting, data in settings.items():
            found += _runs((*_RIVALS, Row("Our", setting.row.policy)), model, data)
    return found


def _table_3() -> tuple[Evaluation, ...]:
    data = ("DocVQA", "TextVQA", "OCRBench", "Nocaps")
    found: tuple[Evaluation, ...] = ()
    for model, (*_, lines) in _TABLE_3.items():
        table = (Row("- - - - -", "full"), *(setting.row for setting in lines))
        found += _runs(table, model, data)
    return found


def _figure(*settings: Setting3) -> tuple[Evaluation, ...]:
    """DocVQA with LLaVA 1.5 7B; the figures' points are not printed, so these are ours."""
    table = (Row("- - - - -", "full"), *(setting.row for setting in settings))
    return _runs(table, "LLaVA 1.5 7B", ("DocVQA",))


_STORED = tuple(Setting3(stored) for stored in (10, 20, 30, 40, 50, 60, 80))
_CORES = tuple(Setting3(40, core, every) for every in (1, 3, 5) for core in (10, 20, 30))
_PREFILL = tuple(Setting3(45, 30, 3, p) for p in (50, 60, 70, 80, 90))
_TEXT = tuple(Setting3(45, 30, 3, None, t) for t in (20, 40, 50, 60, 80))
_NO_DATA = "nothing to measure: it explains"

TABLES = [
    Item("parameters", (), _NO_DATA),
    Item("six data sets", _table_2()),
    Item("settings", (*_table_3(), speed("a-vl-table-3"))),
]
FIGURES = [
    Item("attention by type of token", (Inspection(what="attention", samples=100, on="LLaVA 1.5 7B: Flickr30k"),)),
    Item("the sequence", (), _NO_DATA),
    Item("vision attention on the picture", (Inspection(what="patches", samples=1, on="LLaVA 1.5 7B"),)),
    Item("concordance of layers", (Inspection(what="concordance", on="LLaVA 1.5 7B: OCRVQA"),)),
    Item("concordance of steps", (Inspection(what="concordance", on="LLaVA 1.5 7B: OCRVQA"),)),
    Item("the design", (), _NO_DATA),
    Item("the operator", (), _NO_DATA),
    Item(
        "time of the operator",
        (Script(words=["python", "-m", "benchmarks.kernels", "--batch", "1", "2", "4", "8", "16"]),),
        "an A40",
    ),
    Item("S, C and K", (*_figure(*_STORED), *_figure(*_CORES))),
    Item("P and T", (*_figure(*_PREFILL), *_figure(*_TEXT))),
]
TEXTS = [Item("decoder inference latency", (speed("a-vl-latency"),), "an A40")]


def _latency() -> Iterator[Point]:
    # Sec. "Decoder Inference Latency": 50 % of the cache is 1.8 times as fast, the core alone 1.1 times more.
    for batch in (1, 2, 4, 8):
        setting = Setting(batch, 2880 + 64, 64, 128)
        for policy, share in (
            (policies.Full(), 1.0),
            (policies.AVL(keep=0.5, core=None), 1 / 1.8),
            (policies.AVL(keep=0.5, core=0.3), 0.505),
        ):
            yield Point("llava-next-vicuna-7b", setting, policy, {"relative_decode": round(share, 3)})


def shares(policy: policies.AVL, vision: int, text: int, answer: int) -> tuple[float, float]:
    """Percent of the entries of a prompt that are stored, and that a step of an answer attends to on average."""
    assert policy.keep is not None
    window = text if policy.text is None or policy.longest_text is None else int(policy.text * policy.longest_text)
    refresh = answer // policy.refresh / answer
    core = policy.keep if policy.core is None else policy.core
    used = refresh * policy.keep + (1 - refresh) * core
    stored, attended = (100 * (share * vision + min(text, window)) / (vision + text) for share in (policy.keep, used))
    return stored, attended


def _memory() -> Iterator[Point]:
    for model, vision, others, full, lines in _TABLE_3.values():
        setting = Setting(1, vision + others - 1, others - 1, 2)  # of two new tokens, one is cached
        yield Point(model, setting, policies.Full(), {"cache_megabytes": full})
        for line, printed in lines.items():
            names = ("stored_percent", "used_percent", "cache_megabytes")
            computed = dict(zip(names, shares(line.policy, vision, others, _ANSWER), strict=False))
            yield Point(model, setting, line.policy, dict(zip(names, printed, strict=True)), computed)


SPEED = {
    "a-vl-latency": SpeedTable(
        "A-VL, Decoder Inference Latency: LLaVA-1.6-7B, 50 % of the cache kept",
        "A40",
        tuple(_latency()),
        (
            "batches and prompt length not given: here five tiles of 576 tokens",
            "1 / 1.8 and 50.5 % hold for all batches",
        ),
    ),
    "a-vl-table-3": SpeedTable(
        "A-VL, Table 3: stored and used cache, memory of the cache",
        "not given",
        tuple(_memory()),
        (
            "prompt lengths not given: the full cache's megabytes hold 646 and 2249 tokens",
            "the printed megabytes are the printed percent of the full cache's, so they resolve 6 to 22 tokens",
            "maximum text token length not given: here 96, for which the three rows with T are nearest",
            "stored and used percent are computed; length of answers not given: here one of five steps is a refresh",
            "our bytes are those allocated, in tiles of 16 slots",
        ),
    ),
}
