"""The settings of the papers' tables, copied from the papers by hand: what every command must run.

By table or figure: runs of `vlkv eval`, each with its metrics and its rows in the paper's order. A row is the printed
name and its policies, one for each column. PREFIXKV[file] stands for PrefixKV with the profile in that file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.papers.one_token import OneToken
from vlkv.policies import (
    AVL,
    CSP,
    H2O,
    IVTP,
    KIVI,
    AirCache,
    ElasticCache,
    FasterVLM,
    FastV,
    Full,
    HiRED,
    ImgRandom,
    LightKV,
    LookM,
    PiToMe,
    Policy,
    PrefixKV,
    PyramidKV,
    Random,
    RoCo,
    SnapKV,
    StreamingLLM,
    ToFu,
    ToMe,
    compose,
)  # fmt: skip


class Profiled(NamedTuple):
    """PrefixKV with a profile."""

    file: str
    keep: float
    merging: str = "none"


Column = Policy | Profiled
Rows = list[tuple[str, list[Column]]]


class Run(NamedTuple):
    """One command."""

    metrics: str
    rows: Rows
    judge: bool = False


FULL: tuple[str, list[Column]] = ("Full", [Full()])
NINE = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def row(name: str, make: Callable[..., Column], keeps: list[float], **options: object) -> tuple[str, list[Column]]:
    return name, [make(keep=keep, **options) for keep in keeps]


def full(name: str) -> tuple[str, list[Column]]:
    return name, [Full()]


# --- AirCache: only vision tokens are evicted (Sec. 4.1); Elastic Cache does not merge (App. B) --------------------


def rivals(keeps: list[float]) -> Rows:
    return [
        FULL,
        row("H2O", H2O, keeps, scope="vision"),
        row("Elastic", ElasticCache, keeps, scope="vision", merging="none"),
        row("PrefixKV", PrefixKV, keeps, scope="vision"),
        row("SnapKV", SnapKV, keeps, scope="vision"),
        row("Ours", AirCache, keeps, scope="vision"),
    ]


def pruning() -> Rows:
    keeps = [0.5, 0.1, 0.01]
    return [
        FULL,
        row("FastV", FastV, keeps, layer=2),
        row("FasterVLM", FasterVLM, keeps),
        ("IVTP", [IVTP(keep=0.5, groups=0.707), IVTP(keep=0.1, groups=0.316), IVTP(keep=0.01, groups=0.1)]),
        row("Ours", AirCache, keeps),
    ]


def one_token() -> Run:
    places: list[dict[str, int | float]] = [{"place": place} for place in (1, 2, 5)]
    places += [{"share": share} for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)]
    methods = {"H2O": "h2o", "Elastic": "elasticcache(merging='none')", "PrefixKV": "prefixkv", "SnapKV": "snapkv",
               "Ours": "aircache"}  # fmt: skip
    rows: Rows = [("none", [OneToken(method="aircache", place=0)])]
    for name, method in methods.items():
        rows += [
            (f"{name}, {option}={value}", [OneToken(method=method, **{option: value})])
            for place in places
            for option, value in place.items()
        ]
    return Run("anls", rows)


FOUR, THREE, ONE, TWO = [0.5, 0.1, 0.05, 0.01], [0.5, 0.1, 0.01], [0.01], [0.1, 0.01]
VIDEO = Run("", rivals(THREE), judge=True)
EXAMPLE = [Run("exact", [r for r in rivals(ONE) if r[0] in ("Full", "H2O", "Elastic", "Ours")])]
AIRCACHE: dict[str, list[Run]] = {
    "Table 1": [Run("anls", rivals(FOUR))],
    "Table 2": [Run("exact", rivals(THREE)), Run("mme", rivals(THREE)), VIDEO],
    "Table 4": [Run("anls", pruning()), Run("exact", pruning()), Run("mme", pruning()), Run("", pruning(), judge=True)],
    "Table 5": [Run("anls", [
        row("Continuous window (16)", AirCache, ONE, window="recent", rows=16),
        row("Continuous window (32)", AirCache, ONE, window="recent", rows=32),
        row("All text tokens", AirCache, ONE, window="text"),
        row("Visual window (32)", AirCache, ONE, window="vision", rows=32),
        row("Average allocation", AirCache, ONE, allocation="uniform"),
        row("Pyramid allocation", AirCache, ONE, allocation="pyramid"),
        row("Only w/ s_t", AirCache, ONE, allocation="strength"),
        row("Only w/ s_k", AirCache, ONE, allocation="skewness"),
        row("Ours", AirCache, ONE, window="elite", allocation="both", alpha=0.9),
    ])],
    "Table 6": [Run("anls", [
        row("H2O*", H2O, FOUR, scope="all"),
        row("H2O", H2O, FOUR, scope="vision"),
        row("Ours*", AirCache, FOUR, scope="all"),
        row("Ours", AirCache, FOUR, scope="vision"),
    ])],
    "Table 8": [Run("anls", rivals(FOUR))],
    "Table 10": [VIDEO],
    "Table 11": [Run("anls", [row(f"{share}%", AirCache, TWO, merging=share / 100)
                              for share in (100, 80, 60, 40, 20, 0)])],
    "Table 12": [Run("anls", [row(str(alpha), AirCache, TWO, alpha=alpha)
                              for alpha in (0.99, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)])],
    "Figure 3": [one_token()], "Figure 4": [one_token()], "Figure 5": [one_token()],
    "Figure 6": EXAMPLE, "Figure 7": EXAMPLE, "Figure 8": EXAMPLE, "Figure 9": EXAMPLE,
}  # fmt: skip


# --- PrefixKV: all tokens compete; profiles of ten samples (Sec. 4.1) ------------------------------------------------


def profiled(name: str = "Ours", file: str = "PROFILE.json", keeps: list[float] = NINE, merging: str = "none"):
    return name, [Profiled(file, keep, merging) for keep in keeps]


def pyramid(keep: float) -> Policy:
    """PyramidKV's budgets in the baseline of Sec. 4.3: equal scores, no merging."""
    return compose(ElasticCache(keep=keep, scope="all", merging="none"), allocate=PyramidKV(keep=keep, scope="all"))


def open_answers(keeps: list[float] = NINE, *, with_pyramid: bool = False) -> Rows:
    found: Rows = [
        FULL,
        row("Local", StreamingLLM, keeps, scope="all"),
        row("H2O", H2O, keeps, scope="all"),
        row("Elastic", ElasticCache, keeps, scope="all", merging="position"),
        profiled(keeps=keeps),
    ]
    return [*found[:3], ("Pyramid", [pyramid(keep) for keep in keeps]), *found[3:]] if with_pyramid else found


def budget_128() -> Rows:
    return [
        full("Base"),
        ("Local", [StreamingLLM(budget=128)]),
        ("H2O", [H2O(budget=128)]),
        ("Pyramid", [PyramidKV(budget=128)]),
        ("Ours", [PrefixKV(budget=128)]),
    ]


BOTH = [
    Run("perplexity self-rouge-l", open_answers(with_pyramid=True)),
    Run("perplexity self-rouge-l", open_answers()),
]
QUARTER = Run("exact", open_answers([0.2])[1:])
PREFIXKV: dict[str, list[Run]] = {
    "Table 1": BOTH,
    "Table 2": BOTH,
    "Table 4": [Run("perplexity", [
        row("Baseline", ElasticCache, NINE, scope="all", merging="none"),
        ("Pyramid", [pyramid(keep) for keep in NINE]),
        profiled("PrefixKV"),
    ])],
    "Table 5": [Run("perplexity", [profiled(str(n), f"PROFILE-{n}.json") for n in (1, 5, 10, 20)])],
    "Table 6": [Run("perplexity", [profiled("Offline"), row("Online", PrefixKV, NINE, scope="all")])],
    "Table 8": [Run("perplexity", [profiled(name, f"PROFILE-{name}.json") for name in ("VQA", "OCR", "reasoning")])],
    "Table 9": [Run("perplexity", [
        profiled("(0, 100]", "PROFILE-short.json"),
        profiled("(100, 500]", "PROFILE-medium.json"),
        profiled("(500, inf]", "PROFILE-long.json"),
    ])],
    "Table 10": [Run("perplexity", [profiled(delta, f"PROFILE-delta-{delta}.json", [0.5])
                                    for delta in ("0.0125", "0.025", "0.05", "0.075", "0.1")])],
    "Table 11": [Run("perplexity", [profiled(str(n), f"PROFILE-steps-{n}.json", [0.5])
                                    for n in (7, 8, 9, 10, 11, 12)])],
    "Table 12": [Run("perplexity", [
        profiled("PrefixKV"), profiled("Position", merging="position"), profiled("Feature", merging="cosine"),
    ])],
    "Table 13": [Run("perplexity", open_answers())],
    "Table 14": [Run("f1 rouge-l", budget_128()), Run("needle", budget_128())],
    "Table 15": [Run("f1 rouge-l", [
        FULL,
        ("KIVI 12.5%", [KIVI(bits=2, window=128)]),
        ("KIVI 25%", [KIVI(bits=4, window=128)]),
        ("KIVI 50%", [KIVI(bits=8, window=128)]),
        ("Ours 0.125", [PrefixKV(keep=0.125)]),
        ("Ours 0.25", [PrefixKV(keep=0.25)]),
        ("Ours 0.5", [PrefixKV(keep=0.5)]),
        ("KIVI and ours, 3.125%", [compose(PrefixKV(keep=0.125), store=KIVI(bits=4, window=128))]),
    ])],
    "Table 16": [Run("perplexity", open_answers([0.5]))],
    "Table 17": [Run("perplexity", open_answers([0.5]))],
    **{f"Table {n}": [QUARTER] for n in range(18, 23)},
}  # fmt: skip
# Of the commands of `vlkv profile`: keeps, samples, and the options of the search.
PROFILES: dict[str, list[tuple[list[float], int | None, float | None, int | None]]] = {
    "Table 1": [(NINE, 10, None, None)] * 2, "Table 2": [(NINE, 10, None, None)] * 2,
    "Table 4": [(NINE, 10, None, None)], "Table 5": [(NINE, n, None, None) for n in (1, 5, 10, 20)],
    "Table 6": [(NINE, 10, None, None)], "Table 7": [(NINE, 10, None, None), (NINE, None, None, None)],
    "Table 8": [(NINE, 10, None, None)] * 3, "Table 9": [(NINE, 10, None, None)] * 3,
    "Table 10": [([0.5], 10, delta, None) for delta in (0.0125, 0.025, 0.05, 0.075, 0.1)],
    "Table 11": [([0.5], 10, None, steps) for steps in (7, 8, 9, 10, 11, 12)],
    "Table 12": [(NINE, 10, None, None)], "Table 13": [(NINE, 10, None, None)],
    "Table 16": [([0.5], 10, None, None)], "Table 17": [([0.5], 10, None, None)],
    **{f"Table {n}": [([0.2], 10, None, None)] for n in range(18, 23)},
}  # fmt: skip


# --- LightKV: 55 % of the vision entries of all layers (Eq. 9) -------------------------------------------------------

CIDER, MME, POPE, EXACT, VQA, ANLS = "cider", "mme", "exact pope-f1", "exact", "vqa", "anls"
HALF_IMAGES = {576: 0.458, 2144: 0.489}  # (half of all tokens, without 48 of text) of the vision tokens


def lightkv_1(order: str, vision: int, fastv: float, windows: tuple[int, ...]) -> Rows:
    known: dict[str, Policy] = {
        "Vanilla": Full(),
        "Elastic": ElasticCache(keep=0.5, scope="all", merging="position"),
        "Rand": Random(keep=0.5, scope="all"),
        "ImgRand": ImgRandom(keep=HALF_IMAGES[vision]),
        "ToMe (C)": ToMe(keep=0.5, on="cache"),
        "HiRED": HiRED(keep=0.55),
        "ToFu": ToFu(keep=0.125),
        "PiToMe": PiToMe(keep=0.125),
        "ToMe (P)": ToMe(keep=0.125),
        "FastV": FastV(keep=fastv, layer=2),
        "LightKV": LightKV(windows=windows, rho=None),
    }
    return [(name, [known[name]]) for name in order.split(", ")]


ORDERS = [
    ("Vanilla, Elastic, Rand, ImgRand, ToMe (C), ToFu, PiToMe, ToMe (P), LightKV, FastV", 576, 0.526, (4, 2, 1)),
    ("Vanilla, Elastic, Rand, ToMe (C), ImgRand, HiRED, ToFu, ToMe (P), PiToMe, FastV, LightKV", 576, 0.52, (4, 2, 1)),
    ("Vanilla, Elastic, Rand, ToMe (C), ImgRand, ToMe (P), ToFu, PiToMe, FastV, LightKV", 2144, 0.526, (6, 4, 2)),
    ("Vanilla, Elastic, Rand, ImgRand, ToMe (C), FastV, HiRED, ToMe (P), ToFu, PiToMe, LightKV", 2144, 0.52, (6, 4, 2)),
]


def by_rate(rate: float, fastv: float, layers: tuple[int, ...], order: str, suffix: str = "") -> Rows:
    known: dict[str, Policy] = {
        "FastV": FastV(keep=fastv), "ToFu": ToFu(keep=0.125, layers=layers),
        "PiToMe": PiToMe(keep=0.125, layers=layers), "ToMe (P)": ToMe(keep=0.125, layers=layers),
        "LightKV": LightKV(rate=rate),
    }  # fmt: skip
    return [(f"{name}{suffix}", [known[name]]) for name in order.split(", ")]


TABLE_2: Rows = [
    full("Vanilla"),
    *by_rate(0.6, 0.573, (13, 20, 28), "FastV, ToFu, PiToMe, ToMe (P), LightKV", ", 60%"),
    *by_rate(0.55, 0.52, (12, 18, 25), "FastV, PiToMe, ToMe (P), ToFu, LightKV", ", 55%"),
]
TABLE_5: Rows = [full("Vanilla"), *[(f"layer {n}, w {w}", [LightKV(layers=(n,), windows=(w,))])
                                    for n in (3, 14) for w in (1, 2, 4)]]  # fmt: skip
TABLE_7: Rows = [full("Vanilla"), *by_rate(0.55, 0.515, (10, 16, 22), "FastV, ToMe (P), PiToMe, ToFu, LightKV")]
TABLE_8: Rows = [full("Vanilla"), *[(f"{r}%", [LightKV(rate=r / 100)]) for r in (55, 40, 30, 20)]]
TABLE_9: Rows = [
    full("Vanilla"), ("W=[4,2,1]", [LightKV(windows=(4, 2, 1))]), ("W=[6,4,2]", [LightKV(windows=(6, 4, 2))]),
]  # fmt: skip
EVE: Rows = [full("Vanilla"), ("FastV", [FastV(keep=0.52)]), ("LightKV", [LightKV()])]
FIGURE_6: Rows = [full("Vanilla"), *[(f"layer {n}", [LightKV(layers=(n,), windows=(6,))])
                                     for n in (3, 5, 10, 15, 20, 25, 30, 35)]]  # fmt: skip


def each(rows: Rows, *metrics: str) -> list[Run]:
    return [Run(metric, rows) for metric in metrics]


LIGHTKV: dict[str, list[Run]] = {
    "Table 1": [run for order in ORDERS for run in each(lightkv_1(*order), CIDER, MME, POPE, EXACT, VQA)],
    "Table 2": each(TABLE_2, CIDER, EXACT, MME, POPE, VQA),
    "Table 3": each(EVE, CIDER, MME, POPE, VQA),
    "Table 5": each(TABLE_5, CIDER, EXACT, MME, POPE, VQA),
    "Table 7": each(TABLE_7, CIDER, EXACT, MME, POPE, VQA),
    "Table 8": each(TABLE_8, CIDER, EXACT, MME, POPE, VQA),
    "Table 9": each(TABLE_9, CIDER, ANLS, EXACT, MME, POPE, VQA),
    "Figure 4": each(TABLE_8, CIDER, EXACT, MME, POPE, VQA),
    "Figure 6": each(FIGURE_6, CIDER, EXACT, MME, POPE, VQA),
}


# --- CSP: 10 % heavy hitters and 10 % recent tokens; c by data set (App. A.1) ----------------------------------------


def milebench(c: float, recent_bias: float = 1.0) -> Run:
    def lookm(merging: str, text_prior: bool) -> list[Column]:
        return [LookM(keep=0.2, merging=merging, text_prior=text_prior)]

    return Run("exact rouge-l", [
        full("Full Cache"), ("H2O", [H2O(keep=0.2)]), ("SnapKV", [SnapKV(keep=0.2)]), ("ReCo", [RoCo(keep=0.2)]),
        ("LOOK-M (A-Merge)", lookm("average", False)), ("LOOK-M (W-Merge)", lookm("weighted", False)),
        ("LOOK-M (P-Merge)", lookm("pivot", False)), ("LOOK-M (TP+A-Merge)", lookm("average", True)),
        ("LOOK-M (TP+W-Merge)", lookm("weighted", True)), ("LOOK-M (TP+P-Merge)", lookm("pivot", True)),
        ("CSP (Ours)", [CSP(keep=0.2, c=c, recent_bias=recent_bias)]),
    ])  # fmt: skip


MODEL = [milebench(c) for c in (0.5, 0.9, 0.0, 0.1)] + [milebench(0.5, 1.5)]
RATIOS = [Run("exact rouge-l", [(str(r), [CSP(keep=0.2, c=c)])
                                for r, c in ((0.0, 1.0), (0.1, 0.9), (0.5, 0.5), (0.9, 0.1), (1.0, 0.0))])]  # fmt: skip


def budgets(keeps: list[float]) -> Run:
    return Run("exact rouge-l", [
        full("Full Cache"), row("H2O", H2O, keeps), row("SnapKV", SnapKV, keeps), row("RoCo", RoCo, keeps),
        row("LOOK-M", LookM, keeps), row("CSP (Ours)", CSP, keeps, c=0.5),
    ])  # fmt: skip


CROSS: dict[str, list[Run]] = {
    "Table 1": MODEL * 2,
    "Table 3": [budgets([0.2])],
    "Table 4": RATIOS,
    "Figure 3": RATIOS,
    "Figure 4": [Run("exact rouge-l", [
        ("selection, n-Softmax", [CSP(keep=0.2)]), ("selection, Softmax", [CSP(keep=0.2, score_n=0, decode_n=0)]),
        ("overall, n-Softmax", [CSP(keep=0.2, regions=False)]),
        ("overall, Softmax", [CSP(keep=0.2, regions=False, score_n=0, decode_n=0)]),
    ])],
    "Figure 5": [budgets([0.1, 0.2, 0.3, 0.6])],
}  # fmt: skip


# --- A-VL: S, C, K, P, T of Table 3 ----------------------------------------------------------------------------------


def avl(stored: float, core: float | None = None, refresh: int = 3, prefill: float | None = None,
        text: float | None = None) -> list[Column]:  # fmt: skip
    return [AVL(keep=stored, core=core, refresh=refresh, prefill=prefill, text=text)]


def table_2(ours: list[Column]) -> Rows:
    h2o = H2O(keep=0.5, recent=0.75, scope="all")
    return [full("Original"), ("FastV", [FastV(keep=0.5)]), ("H2O", [h2o]), ("Our", ours)]


S40, S45 = ("40 - - - -", avl(0.4)), ("45 30 3 - -", avl(0.45, 0.3))
S40C = ("40 30 3 - -", avl(0.4, 0.3))
P90 = ("45 30 3 90 -", avl(0.45, 0.3, 3, 0.9))


def t(percent: int) -> tuple[str, list[Column]]:
    return f"45 30 3 90 {percent}", avl(0.45, 0.3, 3, 0.9, percent / 100)


def table_3(*rows: tuple[str, list[Column]]) -> list[Run]:
    return each([full("- - - - -"), *rows], "anls", "vqa", "ocrbench", "cider")


ADAPTIVE: dict[str, list[Run]] = {
    "Table 2": [
        *each(table_2(avl(0.4)), "anls", "vqa", "ocrbench", "cider"),
        *each(table_2(avl(0.45, 0.3)), "anls", "vqa", "ocrbench", "cider"),
        *each(table_2(avl(0.45, 0.3, 3, 0.9)), "anls"),
        *each(table_2(avl(0.45, 0.3, 3, 0.9, 0.7)), "vqa", "ocrbench"),
        *each(table_2(avl(0.4)), "cider", "vqa"),
        *each(table_2(avl(0.4)), "anls", "vqa", "ocrbench", "cider"),
    ],
    "Table 3": [*table_3(S40, S40C, P90, t(50)), *table_3(S40, S45, P90, t(60)), *table_3(S40, P90, t(70)) * 2],
    "Figure 9": [
        *each([full("- - - - -"), *[(f"{s} - - - -", avl(s / 100)) for s in (10, 20, 30, 40, 50, 60, 80)]], "anls"),
        *each([full("- - - - -"), *[(f"40 {c} {k} - -", avl(0.4, c / 100, k))
                                    for k in (1, 3, 5) for c in (10, 20, 30)]], "anls"),
    ],
    "Figure 10": [
        *each([full("- - - - -"), *[(f"45 30 3 {p} -", avl(0.45, 0.3, 3, p / 100)) for p in (50, 60, 70, 80, 90)]],
              "anls"),
        *each([full("- - - - -"), *[(f"45 30 3 - {x}", avl(0.45, 0.3, 3, None, x / 100))
                                    for x in (20, 40, 50, 60, 80)]], "anls"),
    ],
}  # fmt: skip
EVALUATIONS = {"AirCache": AIRCACHE, "PrefixKV": PREFIXKV, "LightKV": LIGHTKV, "CSP": CROSS, "A-VL": ADAPTIVE}
# Of the commands of `vlkv inspect`: the measurement, the policy and the number of samples (None: all).
INSPECTIONS: dict[str, dict[str, list[tuple[str, Policy, int | None]]]] = {
    "AirCache": {
        "Table 13": [("divergence", AirCache(keep=keep), None) for keep in (0.1, 0.01)],
        "Figure 1": [("observers", AirCache(keep=0.1), None)],
        "Figure 3": [("strength", AirCache(keep=0.1), None)],
    },
    "PrefixKV": {
        "Figure 2": [("lorenz", PrefixKV(keep=0.5), None)],
        "Figure 4": [("budgets", PrefixKV(keep=0.5), 100)],
        "Figure 5": [("error", p, 100) for p in (StreamingLLM(keep=0.5), H2O(keep=0.5), ElasticCache(keep=0.5),
                                                 PrefixKV(keep=0.5))],
        "Figure 6": [("budgets", PrefixKV(keep=0.5), 10)],
    },
    "LightKV": {
        "Figure 1": [("cost", LightKV(windows=w), None) for w in ((4, 2, 1), (4, 2, 1), (6, 4, 2), (6, 4, 2))],
        "Figure 7": [("merged", LightKV(windows=(4, 4, 4)), 1)],
    },
    "CSP": {
        "Figure 1": [("divergence", CSP(keep=0.2), None)],
        "Figure 6": [("densities", CSP(keep=0.2), None)],
        "Figure 7": [("divergence", CSP(keep=0.2), None)],
    },
    "A-VL": {
        "Figure 1": [("attention", Full(), None)], "Figure 3": [("patches", Full(), 1)],
        "Figure 4": [("concordance", Full(), None)], "Figure 5": [("concordance", Full(), None)],
    },
}  # fmt: skip
