"""Is a kernel that is measured from the model's own attention better than the best fixed one? docs/drift.md.

    python -m benchmarks.drift MODEL calibrate NAME   measure the drift on calibration prompts, and save it
    python -m benchmarks.drift MODEL tune NAME        answer the calibration questions with every candidate kernel
    python -m benchmarks.drift MODEL ask NAME         answer held-out questions with the kernels chosen by NAME
    python -m benchmarks.drift MODEL show             the tables

MODEL is mini, smollm2 or gemma. NAME says which prompts are used to measure and to choose: for mini "digits" (another
task) or "ledger" (other pages of the same task, with fewer entries), for the others "tasks" (other tasks). All kernels
smooth the scores of the same method, with the same bytes; a batch is prefilled once for all of them. Every answer is
written to benchmarks/results/drift at once, so an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import vlkv
from benchmarks.real import folders, tasks
from vlkv.analysis import drift
from vlkv.compression.smooth import Smooth
from vlkv.mini import CHECKPOINT, pages
from vlkv.policies import AirCache, Full, Policy, SnapKV, compose
from vlkv.tools.commands.tune import ON_GRID, ON_TEXT
from vlkv.tools.evaluation import dialogue, running
from vlkv.tools.evaluation.batching import batches
from vlkv.tools.evaluation.journal import Store
from vlkv.tools.evaluation.keeps import at_bytes
from vlkv.tools.evaluation.records import Record, Settings, Turn

FOLDER = Path(__file__).parent / "results" / "drift"
CALIBRATION_SEED, ASKED_SEED = 77, 4242
LENGTH = 1000  # tokens of a text prompt
_RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, and the method whose scores are smoothed."""

    base: Policy
    on: drift.On
    hand: Smooth  # the kernel that docs/quality.md recommends so far
    fixed: dict[str, tuple[Any, bool]]  # kernels and whether they are one-sided
    bytes: float
    bits: int
    new_tokens: int
    batch: int
    published: Policy
    samples: int  # for the measurement
    tuned: int  # questions for the choice
    asked: int  # held-out questions of each part
    head_dim: int


_SNAP = SnapKV(keep=0.1, kernel=1)
_ON_TEXT: dict[str, Any] = {"base": _SNAP, "on": "order", "hand": Smooth(8, one_sided=True, pooling="max"),
                            "fixed": ON_TEXT, "bytes": 0.1, "bits": 16, "new_tokens": 20, "batch": 1,
                            "published": SnapKV(keep=0.1)}  # fmt: skip
SUBJECTS = {
    "mini": Subject(
        base=AirCache(keep=0.1, window="text"),
        on="grid",
        hand=Smooth((8, 8), one_sided=True, pooling="max"),
        fixed=ON_GRID,
        bytes=0.01,
        bits=4,
        new_tokens=8,
        batch=50,
        published=SnapKV(keep=0.1, window=8, kernel=7, scope="vision"),
        samples=200,
        tuned=100,
        asked=250,
        head_dim=32,
    ),
    "smollm2": Subject(**_ON_TEXT, samples=15, tuned=23, asked=50, head_dim=64),
    "gemma": Subject(**_ON_TEXT, samples=15, tuned=23, asked=50, head_dim=256),
}
CALIBRATIONS = {"mini": ("digits", "ledger"), "smollm2": ("tasks",), "gemma": ("tasks",)}
_MEASURED = {"measured": {}, "by head": {"floor": False}, "alike": {"by_head": False}}  # options of `Drift.weights`
_CALIBRATION_TASKS = ("paragraph", "variables", "common-words")
PARTS = {"mini": ("right", "below")} | dict.fromkeys(
    ("smollm2", "gemma"), ("one-key", "several-keys", "several-values", "word")
)


class Asked(NamedTuple):
    """Questions, and the limit on their answers."""

    records: list[Record]
    new_tokens: int


@functools.cache
def load(model: str) -> tuple[Any, Any]:
    """Parameters and processor."""
    vlkv.keep_programs()
    if model == "mini":
        return vlkv.load(CHECKPOINT)
    return vlkv.load(folders.written(folders.SMOLLM2 if model == "smollm2" else folders.GEMMA3), dtype="float32")


def questions(processor: Any, model: str, part: str, count: int, folder: Path, *, calibration: bool) -> Asked:
    """The questions of a part; those of a calibration have other seeds, and other numbers of a task."""
    subject = SUBJECTS[model]
    if model != "mini":
        names = _CALIBRATION_TASKS if calibration else (part,)
        first = 1000 if calibration else 0
        chosen = [tasks.record(processor, names[i % len(names)], LENGTH, first + i // len(names)) for i in range(count)]
        return Asked(chosen, subject.new_tokens)
    part = part.removeprefix("unseen ")
    rng = np.random.default_rng([CALIBRATION_SEED if calibration else ASKED_SEED, len(part)])
    records = []
    for number in range(count):
        page, entry = pages.held_out_page(rng, "digits" if part == "lines" else part)
        if part == "lines":  # of digit pages; without questions for the whole page, which need more than is kept
            entry = page.entries[1 + number % (len(page.entries) - 1)]
        if calibration and part == "ledger":
            page = pages.ledger_page(pages.held_out_digits(), rng, entries=(1, 3))
            entry = page.entries[int(rng.integers(len(page.entries)))]
        file = folder / f"{part}-{calibration}-{number}.png"
        page.image.save(file)
        records.append(Record(number + 1, f"{part}-{number}", (file,), (Turn(entry.question, (entry.answer,)),)))
    return Asked(records, 40 if part == "digits" else subject.new_tokens)


def calibrate(model: str, name: str) -> None:
    """Measures the drift on calibration prompts, and saves it."""
    subject, (params, processor) = SUBJECTS[model], load(model)
    with TemporaryDirectory() as folder:
        asked = questions(processor, model, name, subject.samples, Path(folder), calibration=True)
        groups = (batch.groups[: batch.real] for batch in batches(asked.records, min(25, subject.batch), None))
        inputs = (
            dialogue.first_inputs(processor, [[asked.records[i] for i in group] for group in each],
                                  query_agnostic=False, frames=1)[0]
            for each in groups
        )  # fmt: skip
        looks = drift.observe(params, inputs, subject.base, sampling=vlkv.Greedy(max_new_tokens=asked.new_tokens))
    measured = drift.measure(looks, on=subject.on)
    drift.save(profile(model, name), measured, subject.base, params.config, name=model)
    print(measured.samples, measured.weights())


def profile(model: str, name: str) -> Path:
    """The file of a measured drift."""
    return FOLDER / f"{model}-{name}.json"


def candidates(model: str, name: str) -> dict[str, Smooth]:
    """All kernels to choose from: the measured one in three forms, and fixed ones."""
    found: dict[str, Smooth] = {}
    measured = drift.load(profile(model, name))
    for kind, options in _MEASURED.items():
        kernel = measured.weights(**options)
        found |= {f"{kind}, {p}": Smooth(kernel, pooling=p) for p in ("max", "avg")}
    for title, (sizes, one_sided) in SUBJECTS[model].fixed.items():
        found |= {f"{title}, {p}": Smooth(sizes, one_sided=one_sided, pooling=p) for p in ("avg", "max")}
    return found


class Answers(Store):
    """The answers to the questions of one part, as a journal of the evaluation; they are written into the results."""

    def __init__(self, results: Store, part: str, records: Sequence[Record], names: Sequence[str]) -> None:
        super().__init__(None, {}, ("row", "turn", "policy"))
        self.results, self.part, self.records, self.names = results, part, records, names
        for row in range(len(records)):
            for policy, name in enumerate(names):
                if (held := results.entries.get((part, row, name))) is not None:
                    self.entries[row, 0, policy] = held

    def append(self, results: Iterable[Any]) -> None:
        """Scores and writes answers."""
        for entry in results:
            row, policy = entry["row"], entry["policy"]
            self.entries[row, 0, policy] = entry
            answer, wanted = entry["answer"], self.records[row].turns[0].answers
            exact = float(answer.strip() == wanted[0])
            score = exact if self.records[row].images else round(tasks.score(wanted, answer), 4)
            kept = {"answer": answer, "score": score, "bytes": entry["bytes"]}
            self.results.append([{"part": self.part, "row": row, "name": self.names[policy], **kept}])


def answer(
    model: str, part: str, count: int, plan: dict[str, Policy], *, calibration: bool, results: Store | None = None
) -> None:
    """Answers what is missing of a part in `results`; None: those of this module."""
    subject, (params, processor) = SUBJECTS[model], load(model)
    results = stored(model) if results is None else results
    with TemporaryDirectory() as folder:
        asked = questions(processor, model, part, count, Path(folder), calibration=calibration)
        title = f"tune {part}" if calibration else part
        journal = Answers(results, title, asked.records, list(plan))
        unseen = part.startswith("unseen")
        settings = Settings(max_new_tokens=asked.new_tokens, batch=subject.batch, query_agnostic=unseen)
        running.run(params, processor, asked.records, list(plan.values()), settings, journal)
    results.close()


def stored(model: str) -> Store:
    """All answers of a model so far."""
    return Store(FOLDER / f"{model}.jsonl", {"model": model, "length": LENGTH}, ("part", "row", "name"))


def policy(model: str, smooth: Smooth | None, base: Policy | None = None) -> Policy:
    """The method with a kernel, at the bytes of the comparison."""
    subject = SUBJECTS[model]
    scored = base or subject.base
    composed = scored if smooth is None else compose(scored, smooth=smooth)
    return at_bytes(composed, subject.bytes, subject.bits, head_dim=subject.head_dim)


def tune(model: str, name: str) -> None:
    """Answers the calibration questions with every kernel."""
    plan = {f"{title} [{name}]" if title.startswith(tuple(_MEASURED)) else title: policy(model, smooth)
            for title, smooth in candidates(model, name).items()}  # fmt: skip
    part, count = _tuned(model, name)
    if part == "lines":  # on ledger pages "max" was as good as "avg" or better for nearly all
        plan = {title: chosen for title, chosen in plan.items() if "max" in title or "[" in title}
    answer(model, part, count, plan, calibration=True)


def _tuned(model: str, name: str) -> tuple[str, int]:
    """The part and the number of the questions that choose."""
    return ("lines", 50) if name == "digits" else (name, SUBJECTS[model].tuned)


def chosen(model: str, name: str, kind: str) -> tuple[str, Smooth]:
    """The best kernel on the calibration questions, among those of a kind; ties: the first.

    Kinds are "measured", "by head" (measured without a floor), "alike" (the same for all heads), "fixed", "rectangle"
    (fixed without the line and column, whose form we drew after we had seen a measured one), and "symmetric".
    """
    rows = [row for row in stored(model).rows if row["part"] == f"tune {_tuned(model, name)[0]}"]
    found = candidates(model, name)
    fixed = {title for title in found if not title.startswith(tuple(_MEASURED))}
    drawn = {title for title in found if title.startswith("line and column")}
    centred = {title for title in fixed - drawn if "before" not in title}
    kinds = {"fixed": fixed, "rectangle": fixed - drawn, "symmetric": centred}
    among = [title for title in found if (title in kinds[kind] if kind in kinds else title.startswith(kind))]

    def key(title: str) -> str:
        return f"{title} [{name}]" if title not in fixed else title

    scores = {(row["row"], row["name"]): row["score"] for row in rows}
    asked = {title for title in among if any(row["name"] == key(title) for row in rows)}
    common = set.intersection(*({row["row"] for row in rows if row["name"] == key(title)} for title in asked))

    def quality(title: str) -> float:
        return float(np.mean([scores[row, key(title)] for row in common])) if title in asked else -1.0

    best = max(among, key=quality)
    return best, found[best]


def ask(model: str, name: str, count: int | None = None, only: Sequence[str] = ()) -> None:
    """Answers the held-out questions: `count` of each part (None: all), with kernels of `only` these names (): all."""
    subject = SUBJECTS[model]
    plan = {"full": Full(), "published": policy(model, None, subject.published), "none": policy(model, None),
            "hand-made": policy(model, subject.hand)}  # fmt: skip
    if model != "mini":  # docs/quality.md smooths what SnapKV's own kernel has smoothed
        plan["hand-made after SnapKV's"] = policy(model, subject.hand, subject.published)
        # The one that we would have guessed: no value is longer, and the pooling is the hand's.
        plan["16 before, max"] = policy(model, Smooth(16, one_sided=True, pooling="max"))
    for kind in (*_MEASURED, "fixed", *(["rectangle"] if model == "mini" else [])):
        title, smooth = chosen(model, name, kind)
        print(name, kind, title, flush=True)
        plan[f"{kind} [{name}]"] = policy(model, smooth)
    plan = {title: each for title, each in plan.items() if not only or title.partition(" [")[0] in only}
    for part in PARTS[model]:
        answer(model, part, count or subject.asked, plan, calibration=False)


def show(model: str) -> None:
    """Means, and paired differences of the measured kernel from the others with bootstrap intervals."""
    rows = [row for row in stored(model).rows if not row["part"].startswith("tune")]
    table: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        table.setdefault(row["name"], {})[row["part"], row["row"]] = row["score"]
    parts = list(dict.fromkeys(row["part"] for row in rows))

    def line(name: str, values: dict[tuple[str, int], float], sign: str = "") -> str:
        column = np.array(list(values.values()))
        low, high = interval(column, np.array([row if model == "mini" else i for i, (_, row) in enumerate(values)]))
        means = {part: np.mean([x for (of, _), x in values.items() if of == part] or [np.nan]) for part in parts}
        ends = f"{100 * column.mean():{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
        return f"  {name:45s} n {len(values)}: {ends}  " + " ".join(
            f"{k} {100 * x:{sign}.0f}" for k, x in means.items()
        )

    print(model)
    for name, values in table.items():
        print(line(name, values))
    for name in CALIBRATIONS[model]:
        ours = table.get(f"measured [{name}]", {})
        for other in [
            each for each in table if each != f"measured [{name}]" and ("[" not in each or f"[{name}]" in each)
        ]:
            both = [key for key in ours if key in table[other]]
            if both:
                print(line(f"measured - {other}", {key: ours[key] - table[other][key] for key in both}, "+"))


def interval(column: np.ndarray, page: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean by the bootstrap over pages: both shapes of a page have the same digits."""
    places = np.unique(page, return_inverse=True)[1]
    sums, counts = np.bincount(places, column), np.bincount(places)
    draws = np.random.default_rng(seed).integers(0, len(sums), (_RESAMPLES, len(sums)))
    low, high = np.quantile(sums[draws].sum(axis=1) / counts[draws].sum(axis=1), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    """Runs one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SUBJECTS)
    parser.add_argument("step", choices=("calibrate", "tune", "ask", "show"))
    parser.add_argument("name", nargs="?", help="of the calibration")
    parser.add_argument("--count", type=int, help="ask: only so many held-out questions of each part")
    parser.add_argument("--only", nargs="+", default=[], help="ask: only with these kernels, such as measured fixed")
    args = parser.parse_args()
    if args.step == "show":
        return show(args.model)
    name = args.name or CALIBRATIONS[args.model][0]
    if args.step == "ask":
        return ask(args.model, name, args.count, args.only)
    return {"calibrate": calibrate, "tune": tune}[args.step](args.model, name)


if __name__ == "__main__":
    main()
