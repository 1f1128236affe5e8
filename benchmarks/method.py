"""Scores smoothed by a chosen kernel, with few bits, against published methods at equal bytes. docs/drift.md.

    python -m benchmarks.method MODEL tune   answer calibration questions with SnapKV's own smoothing of several widths
    python -m benchmarks.method MODEL ask    answer held-out questions
    python -m benchmarks.method MODEL show   the tables

MODEL is mini, smollm2 or gemma. Kernels are those that `benchmarks.drift` has chosen on its calibration questions.
Published methods get 4 bits per number, too, and those that smooth as SnapKV does get the window and the width that are
best for SnapKV on the calibration questions. Every answer is written to benchmarks/results/drift at once, so an
interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks import drift
from benchmarks.drift import SUBJECTS, chosen, interval
from vlkv import policies
from vlkv.compression.smooth import Smooth
from vlkv.mini import pages
from vlkv.policies import RDKV, AdaKV, AirCache, Damage, Downsample, FlashCache, Full, KVzip, Policy, SnapKV, compose
from vlkv.tools.evaluation.journal import Store
from vlkv.tools.evaluation.keeps import at_bytes, relative_size

SHARES = (0.1, 0.05, 0.02, 0.01)
PARTS = {"mini": ("right", "below", "digits"), **{name: drift.PARTS[name] for name in ("smollm2", "gemma")}}
_ALIKE = ("adakv", "criticalkv", "bacon", "chunkkv", "rdkv")  # with SnapKV's window and kernel


def stored(model: str) -> Store:
    """All answers of a model so far."""
    return Store(drift.FOLDER / f"{model}-method.jsonl", {"model": model}, ("part", "row", "name"))


def tuned_snapkv() -> dict[str, SnapKV]:
    """SnapKV with the widths to choose from, for the demo model."""
    named: dict[str, SnapKV] = {}
    for width in (3, 5, 7, 9, 15):
        for pooling in ("max", "avg"):
            options: dict[str, Any] = {"window": 8, "kernel": width, "pooling": pooling, "scope": "vision"}
            named[f"window 8, kernel {width}, {pooling}"] = SnapKV(keep=0.1, **options)
    return named


def best_snapkv() -> SnapKV:
    """The best of `tuned_snapkv` on the calibration questions; ties: the first."""
    named, scores = tuned_snapkv(), dict[str, list[float]]()
    for row in stored("mini").rows:
        if row["part"].startswith("tune"):
            scores.setdefault(row["name"], []).append(row["score"])
    return max(named.items(), key=lambda item: np.mean(scores.get(item[0], [0.0])))[1]


def ours(model: str, name: str) -> dict[str, Policy]:
    """Compositions with the kernels that a calibration has chosen; `keep` is set later."""
    base = SUBJECTS[model].base
    kernels = {kind: chosen(model, name, kind)[1] for kind in ("measured", "fixed")}
    named: dict[str, Policy] = {f"{kind}, 4 bits": compose(base, smooth=smooth) for kind, smooth in kernels.items()}
    for kind, smooth in kernels.items():
        named[f"{kind}, bits by importance"] = compose(base, smooth=smooth, store=RDKV)
    if model != "mini":
        named["measured, 16 bits"] = compose(base, smooth=kernels["measured"])
        named |= {f"{title}, 4 bits": compose(base, smooth=smooth) for title, smooth in of_another(model, name).items()}
    return named


def of_another(model: str, name: str) -> dict[str, Smooth]:
    """The kernels that the calibration of the other text model has chosen: a fixed one, and one for all heads alike."""
    other = "gemma" if model == "smollm2" else "smollm2"
    return {f"{kind} of {other}": chosen(other, name, kind)[1] for kind in ("fixed", "alike")}


def published(model: str) -> dict[str, Policy]:
    """The methods to compare with; `keep` is set later."""
    alike: dict[str, Any] = {"scope": "vision"} if model == "mini" else {"scope": "all"}
    others = ("kvzip", "flashcache", *(("tgvkv", "imgrandom") if model == "mini" else ("random",)))
    of_both = {name: policies.make(name, keep=0.1, **alike) for name in others}
    if model == "mini":
        best = best_snapkv()
        alike |= {"window": best.window, "kernel": best.kernel}
    # For text the best of the symmetric kernels of `benchmarks.drift tune`.
    snap: Policy = best if model == "mini" else compose(SUBJECTS[model].base, smooth=Smooth(9))
    for name in _ALIKE:
        options = {k: v for k, v in alike.items() if (name, k) != ("chunkkv", "kernel")}
        of_both[name] = policies.make(name, keep=0.1, **options)
    named = {f"{type(policy).__name__}, 4 bits": policy for name, policy in of_both.items() if name != "rdkv"}
    return {"SnapKV, 4 bits": snap, "RDKV": of_both["rdkv"]} | named


def ablations(model: str) -> dict[str, Policy]:
    """Our composition with one part replaced; `keep` is set later."""
    base, name = SUBJECTS[model].base, drift.CALIBRATIONS[model][-1]
    measured = chosen(model, name, "measured")[1]
    kernel: Any = measured.kernel
    mirrored = tuple((*(-d for d in offset), weight) for *offset, weight in kernel)
    snap = SnapKV(keep=0.1, window=8, kernel=1, scope="vision")
    smooths: dict[str, Smooth | None] = {
        "symmetric kernel": chosen(model, name, "symmetric")[1],
        "wrong direction": Smooth(mirrored, pooling=measured.pooling),
        "no kernel": None,
    }
    observers: dict[str, Policy] = {
        "SnapKV's observers": snap,
        "KVzip's observers": KVzip(keep=0.1, scope="vision"),
        "the last row observes": AirCache(keep=0.1, alpha=1.0),
    }
    allocators: dict[str, Any] = {
        "equal budgets": snap,
        "one order of a layer's heads": AdaKV,
        "one order of all heads": Damage,
    }
    four: dict[str, Policy] = {title: compose(base, smooth=s) if s else base for title, s in smooths.items()}
    four |= {title: compose(scores, smooth=measured) for title, scores in observers.items()}
    four |= {title: compose(base, smooth=measured, allocate=by) for title, by in allocators.items()}
    bits: dict[str, Policy] = {f"{bits} bits": compose(base, smooth=measured) for bits in (2, 8, 16)}
    return {f"{title}, 4 bits": policy for title, policy in four.items()} | bits


def unseen(model: str) -> dict[str, Policy]:
    """Methods for questions that come after the compression."""
    scored = {"KVzip": KVzip(keep=0.1, scope="vision"), "FlashCache": FlashCache(keep=0.1, scope="vision")}
    bits = {f"{name}, bits by importance": compose(policy, store=RDKV) for name, policy in scored.items()}
    return published(model) | bits


def at(model: str, named: dict[str, Policy], share: float) -> dict[str, Policy]:
    """The policies with a share of the bytes, which their names tell."""
    head_dim = SUBJECTS[model].head_dim

    def bits(name: str) -> int:
        return int(name.split()[-2]) if name.endswith(" bits") else 16

    return {f"{name} @ {share:g}": at_bytes(policy, share, bits(name), head_dim=head_dim)
            for name, policy in named.items()}  # fmt: skip


def downsampled(share: float) -> dict[str, Policy]:
    """The mean of blocks of patches, in 4 bits: the smallest blocks that do not take more than a share of the bytes."""
    store = policies.KIVI(bits=4)
    rows = {side: -(-pages.GRID // side) for side in range(2, 9)}
    fits = (side for side, n in rows.items() if n**2 * relative_size(store) <= share * pages.GRID**2)
    side = next(fits, max(rows))
    return {f"Downsample, 4 bits @ {share:g}": compose(Downsample(side=side, most=rows[side] ** 2), store=store)}


def tune(model: str) -> None:
    """Answers the calibration questions with all widths of SnapKV's smoothing, at the smallest share."""
    subject = SUBJECTS[model]
    plan = {name: at_bytes(p, subject.bytes, 4, head_dim=subject.head_dim) for name, p in tuned_snapkv().items()}
    drift.answer(model, "ledger", subject.tuned, plan, calibration=True, results=stored(model))


def ask(model: str, part: str, count: int, shares: tuple[float, ...], only: list[str], *, ablate: bool = False) -> None:
    """Answers held-out questions of a part; "unseen" in front: they come after the compression.

    Args:
        model: one of `SUBJECTS`.
        part: of the questions.
        count: how many.
        shares: of the bytes.
        only: the beginnings of the names of the methods that answer; none: all.
        ablate: whether our composition with one part replaced answers instead.
    """
    plan: dict[str, Policy] = {"Full": Full()}
    name = drift.CALIBRATIONS[model][-1]
    named = unseen(model) if part.startswith("unseen") else ours(model, name) | published(model)
    if part == "digits":
        named |= {f"calibrated on these, {title}": policy for title, policy in ours(model, "digits").items()}
    for share in shares:
        plan |= at(model, ablations(model) if ablate else named, share)
        if model == "mini" and not ablate:
            plan |= downsampled(share)
    plan = {name: policy for name, policy in plan.items() if not only or name.startswith(tuple(only))}
    drift.answer(model, part, count, plan, calibration=False, results=stored(model))


def show(model: str, ours: list[str]) -> None:
    """Scores in percent, and the paired differences of the first of `ours` from the others with bootstrap intervals."""
    rows = [row for row in stored(model).rows if not row["part"].startswith("tune")]
    groups: dict[str, list[str]] = {}  # both shapes, or all tasks, are one table
    for part in dict.fromkeys(row["part"] for row in rows):
        both = "ledger" if model == "mini" and part != "digits" else part if model == "mini" else "all tasks"
        groups.setdefault(f"unseen {both}" if part.startswith("unseen") else both, []).append(part)
    for title, parts in groups.items():
        table: dict[str, dict[str, dict[tuple[str, int], float]]] = {}  # by method, share and question
        for row in rows:
            if row["part"] in parts:
                name, _, share = row["name"].partition(" @ ")
                table.setdefault(name, {}).setdefault(share, {})[row["part"], row["row"]] = row["score"]
        shares = sorted({share for each in table.values() for share in each if share}, key=float)
        first = next((name for name in ours if name in table), next(iter(table)))
        print(f"\n| {title}: {', '.join(parts)} | {' | '.join(f'{100 * float(share):.3g} %' for share in shares)} |")
        print("|---" * (1 + len(shares)) + "|")
        for name in sorted(table, key=lambda name: (name != "Full", not name.startswith(("measured", "fixed")))):
            of = table[name]
            cells = [_cell(of.get(share, of.get("", {})), table[first].get(share, {}), parts) for share in shares]
            print(f"| {name} | {' | '.join(cells)} |")


def _cell(scores: dict[tuple[str, int], float], first: dict[tuple[str, int], float], parts: list[str]) -> str:
    """The mean of all parts, the means of each, and the first method minus this one, on the questions of both."""
    both = [key for key in scores if key in first]
    if not both:
        return ""
    score = np.array([scores[key] for key in both])
    less = np.array([first[key] for key in both]) - score
    # Both shapes of a page have the same digits; the texts of two tasks have nothing in common.
    pages_of = [row if part.endswith(("right", "below")) else number for number, (part, row) in enumerate(both)]
    low, high = interval(less, np.array(pages_of))
    each = [np.mean([scores[key] for key in both if key[0] == part] or [np.nan]) for part in parts]
    means = f"{100 * score.mean():.0f} ({', '.join(f'{100 * x:.0f}' for x in each)}; n {len(both)})"
    return f"{means} {100 * less.mean():+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def main() -> None:
    """Runs one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SUBJECTS)
    parser.add_argument("step", choices=("tune", "ask", "show"))
    parser.add_argument("--part", nargs="+", help="ask: which questions; with 'unseen ' in front after the compression")
    parser.add_argument("--count", type=int, default=100, help="ask: of each part (default: %(default)s)")
    parser.add_argument("--share", type=float, nargs="+", help="ask: of the bytes")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names of methods, or their beginnings")
    parser.add_argument("--ablate", action="store_true", help="ask: our composition with one part replaced")
    args = parser.parse_args()
    if args.step == "show":
        return show(args.model, args.only or ["measured, 4 bits", "FlashCache, bits by importance"])
    if args.step == "tune":
        return tune(args.model)
    shares = tuple(args.share or (SHARES if args.model == "mini" else (SUBJECTS[args.model].bytes,)))
    if args.model == "mini":
        for part in args.part or PARTS["mini"]:
            ask(args.model, part, args.count, shares, args.only, ablate=args.ablate)
        return None
    for count in range(8, args.count + 1, 12):  # so that an interrupted run has as many questions of each part
        for part in args.part or PARTS[args.model]:
            ask(args.model, part, count, shares, args.only)
    return None


if __name__ == "__main__":
    main()
