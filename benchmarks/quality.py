"""Measures how well the demo model answers from a compressed cache, at equal bytes: every method, and compositions.

    python -m benchmarks.quality [SECTION ...] [--questions 500] [--out benchmarks/results/quality.json]

Sections (default: all of them):

    digits              digit pages with the full cache
    damage KIND         every method and the controls on what compression harms first. KIND is "ledger": small signs at
                        a place that the question names; "digits": all that is written; "unseen": the question comes
                        after the compression. On a fifth, unseen on a twentieth of the pages
    baselines           ledger pages of both shapes: Oracle, random tokens, a coarser image
    methods             every method with default settings at 20, 10, 5 and 2 % of the bytes
    compositions right  smoothed scores and fewer bits, on pages whose values are to the right of their tags
    compositions        the same on pages of both shapes
    shorter prompts     methods that reduce the prompt, on a fifth of the questions
    query_agnostic      compressed before any question is known, then several questions with `extend`; on a fifth
    several             three pages and a question about one of them; on a fifth

The questions are held out: their digits were never trained on. Bytes are the share of the bytes that the vision entries
take in a full bfloat16 cache; all text is kept (scope="vision"). Quantised entries are smaller, so more of them are
kept at equal bytes; their scales and minima are counted. For methods that reduce the prompt, bytes are the `keep` of
their last stage; `held` is what they hold. The questions are answered as by `vlkv eval`.
Results are written after every method, so an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import vlkv
from benchmarks.quality_sections import Cell, Section, sections
from benchmarks.quality_tables import DOCUMENTS, EVALUATED, plot, show, write_documents
from vlkv import analysis, policies
from vlkv.generation import jitted
from vlkv.generation.begin import Begun
from vlkv.inputs import Inputs
from vlkv.mini import CHECKPOINT, pages
from vlkv.policies import Policy
from vlkv.terminal import track
from vlkv.tools.benching import machine
from vlkv.tools.evaluation.batching import Compress, Work, compressed
from vlkv.tools.evaluation.journal import Entry, Store
from vlkv.tools.evaluation.keeps import share_programs
from vlkv.tools.evaluation.metrics import exact
from vlkv.tools.evaluation.records import Record, Settings, Turn
from vlkv.tools.evaluation.running import run
from vlkv.tools.evaluation.statistics import difference, wilson

BATCH = 50


class Question(NamedTuple):
    """A question for the evaluation, and where its answer is."""

    record: Record
    evidence: tuple[int, ...]  # indices among the vision tokens of all images


def questions(section: Section, count: int, seed: int, folder: Path) -> list[Question]:
    """The questions of a section, with the images in `folder`; the same seed gives the same questions."""
    rng = np.random.default_rng(seed)
    asked: list[Question] = []
    for number in range(count):
        if section.kind == "several":
            shown, chosen, entry = pages.held_out_set(rng)
            entries: Sequence[pages.Entry] = [entry]
        else:
            page, entry = pages.held_out_page(rng, section.kind)
            shown, chosen, entries = [page], 0, page.entries[:4] if section.query_agnostic else [entry]
        images = tuple(folder / f"{number}-{i}.png" for i in range(len(shown)))
        for page, file in zip(shown, images, strict=True):
            page.image.save(file)
        for entry in entries:
            turn, line = Turn(entry.question, (entry.answer,)), len(asked) + 1
            cells = tuple(chosen * pages.GRID**2 + cell for cell in entry.evidence)
            asked.append(Question(Record(line, str(line), images, (turn,)), cells))
    return asked


def evidence(inputs: Inputs, cells: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Mask [B, T] of the prompt tokens that are the vision tokens `cells` of their row."""
    number = np.cumsum(inputs.is_vision, axis=1) - 1
    return np.stack([np.isin(n, c) & v for n, c, v in zip(number, cells, inputs.is_vision, strict=True)])


class Kept(NamedTuple):
    """What the cache of one row keeps."""

    recall: np.ndarray  # [L, K] share of the first question's evidence
    held: float  # share of the vision entries, mean over layers and heads


@jax.jit
def _look(cache: vlkv.PackedCache, evidence: Any, is_vision: Any) -> tuple[jax.Array, jax.Array]:
    """Recall [B, L, K] and held [B] of `Kept`."""
    held = analysis.held_by_head(cache, is_vision.shape[1]) & is_vision[:, None, None]
    share = jnp.mean(jnp.sum(held, axis=-1), axis=(1, 2)) / jnp.sum(is_vision, axis=1)
    return analysis.evidence_recall(cache, evidence), share


_oracle = jax.jit(analysis.oracle_cache, static_argnames="new_tokens")


def _noting(asked: Sequence[Question], kept: Sequence[list[Kept]], *, oracle: bool) -> Compress:
    """`compressed`, or the oracle's caches, which adds what the caches of each policy keep to `kept`."""

    def compress(work: Work, plan: Sequence[Policy], todo: Sequence[int]) -> Iterator[tuple[int, int, Begun]]:
        inputs, new = work.inputs, work.new_tokens
        mask = evidence(inputs, [asked[group[0]].evidence for group in work.batch.groups])
        caches = compressed(work, plan, todo)
        if oracle:
            prompt = jitted.read_prompt(work.params, inputs, new_tokens=new)
            key = jax.random.key(work.batch.number)
            chosen = ((i, _oracle(prompt, mask, plan[i], new_tokens=new, key=key)) for i in todo)
            caches = ((i, cache.bytes, Begun(cache=cache, logits=prompt.logits)) for i, cache in chosen)
        for i, size, begun in caches:
            rows = zip(*map(np.asarray, _look(begun.cache, mask, inputs.is_vision)), strict=True)
            kept[i].extend([Kept(*row) for row in rows][: work.batch.real])
            yield i, size, begun

    return compress


def measure(params: Any, processor: Any, section: Section, count: int, seed: int, done: Done) -> None:
    """Measures the rows of a section that the results do not contain yet, method by method."""
    todo = [cell for cell in section.plan if done.find(section, cell, count, seed) is None]
    if not todo:
        return
    settings = Settings(
        max_new_tokens=section.new_tokens,
        batch=BATCH if section.kind != "several" else 10,
        query_agnostic=section.query_agnostic,
        perplexity=section.perplexity,
    )
    programs = share_programs([cell.chosen for cell in todo])
    methods = dict.fromkeys((cell.name, program) for cell, program in zip(todo, programs, strict=True))
    with TemporaryDirectory() as folder:
        asked = questions(section, count, seed, Path(folder))
        records = [question.record for question in asked]
        for name, program in track(list(methods), section.name):
            cells = [cell for cell, used in zip(todo, programs, strict=True) if (cell.name, used) == (name, program)]
            kept: list[list[Kept]] = [[] for _ in cells]
            compress = _noting(asked, kept, oracle=name == "Oracle")
            journal = Store(None, {}, key=("row", "turn", "policy"))
            run(params, processor, records, [cell.chosen for cell in cells], settings, journal, compress=compress)
            for i, cell in enumerate(cells):
                entries = [entry for (_, _, policy), entry in sorted(journal.entries.items()) if policy == i]
                done.add(section, cell, count, seed, summary(cell, asked, entries, kept[i]))


def summary(cell: Cell, asked: Sequence[Question], entries: Sequence[Entry], kept: Sequence[Kept]) -> dict[str, Any]:
    """A row of the results: exact match with its interval, digits by place, perplexity, and evidence recall."""
    wanted = [question.record.turns[0].answers[0] for question in asked]
    answers = [entry["answer"] for entry in entries]
    right = [answer == want for answer, want in zip(answers, wanted, strict=True)]
    low, high = wilson(float(np.mean(right)), len(right))
    tokens, log_probability = (sum(entry[name] for entry in entries) for name in ("reference", "log_probability"))
    about = {"name": cell.name, "bits": cell.bits, "policy": cell.text}
    return {
        **about | {"exact": float(np.mean(right)), "low": low, "high": high},
        "places": by_place(answers, wanted),
        "perplexity": math.exp(-log_probability / tokens) if tokens else None,
        "recall": np.round(np.mean([row.recall for row in kept], axis=0), 4).tolist(),
        "held": float(np.mean([row.held for row in kept])),
        "right": "".join("01"[x] for x in right),
        "said": answers,
    }


def by_place(answers: Sequence[str], wanted: Sequence[str]) -> list[float]:
    """For each place, the share of right digits among the answers that have a digit there."""
    places: dict[int, list[bool]] = defaultdict(list)
    for answer, truth in zip(answers, wanted, strict=True):
        digits = answer.split()
        for place, digit in enumerate(truth.split()):
            places[place].append(digits[place : place + 1] == [digit])
    return [round(float(np.mean(right)), 4) for right in places.values()]


class Done(Store):
    """The results file: rows by section, policy and bytes, which may be of several machines."""

    def __init__(self, path: Path | None, command: str) -> None:
        key = ("section", "policy", "bytes", "questions", "seed")
        super().__init__(path, {"command": command, "machine": machine.describe()}, key)

    def check(self, before: Any) -> None:
        """Refuses nothing: answers do not depend on the machine."""

    def find(self, section: Section, cell: Cell, count: int, seed: int) -> dict[str, Any] | None:
        """The row of a cell; None if it has not been measured."""
        return self.entries.get((section.name, cell.text, cell.bytes, count, seed))

    def add(self, section: Section, cell: Cell, count: int, seed: int, row: dict[str, Any]) -> None:
        """Adds a row and its difference from the full cache, and writes the file."""
        about = {"section": section.name, "kind": section.kind, "bytes": cell.bytes, "questions": count, "seed": seed}
        row = {**about, **row}
        full = self.find(section, Cell("Full", policies.Full(), 1.0), count, seed) or row
        ours, best = (np.array([list(map(float, each["right"]))]) for each in (row, full))
        row["loss"], ends = difference(exact, best, ours)
        row["loss_low"], row["loss_high"] = ends or (row["loss"], row["loss"])
        row["same_as_full"] = float(np.mean([a == b for a, b in zip(row["said"], full["said"], strict=True)]))
        if row is not full:
            del row["said"]
        self.append([row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", help="sections by their name or its beginning (default: all)")
    parser.add_argument("--questions", type=int, default=500, help="number of questions (default: 500)")
    parser.add_argument("--seed", type=int, default=EVALUATED)
    parser.add_argument("--policy", nargs="+", help="only policies that contain one of these, such as aircache")
    parser.add_argument("--out", type=Path, help="file of results as JSON, from which a run resumes")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw quality against bytes")
    parser.add_argument("--documents", action="store_true", help=f"write the tables into {' and '.join(DOCUMENTS)}")
    args = parser.parse_args()
    params, processor = vlkv.load(CHECKPOINT)
    done = Done(args.out, " ".join(["python -m benchmarks.quality", *sys.argv[1:]]))
    for section in sections(params.config.decoder.layers, params.config.decoder.head_dim, args.seed):
        if args.section and not any(section.name.startswith(word) for word in args.section):
            continue
        plan = tuple(c for c in section.plan if _asked(args.policy, c.text) or c.bytes == 1)
        count = round(args.questions * section.share)
        measure(params, processor, dataclasses.replace(section, plan=plan), count, args.seed, done)
        jax.clear_caches()
    show(done.rows)
    if args.plot:
        plot(done.rows, args.plot)
    if args.documents:
        root = Path(__file__).parent.parent
        write_documents(done.rows, [root / name for name in DOCUMENTS])


def _asked(names: list[str] | None, text: str) -> bool:
    return names is None or not {name.lower() for name in names}.isdisjoint(re.findall(r"\w+", text.lower()))


if __name__ == "__main__":
    main()
