"""Measures how well the demo model answers from a compressed cache, at equal bytes: every method, and compositions.

    python -m benchmarks.quality [SECTION ...] [--questions 500] [--out benchmarks/results/quality.json]

Sections (default: all of them):

    digits              digit pages with the full cache
    baselines           ledger pages of both shapes: Oracle, random tokens, a coarser image
    methods             every method with default settings at 20, 10, 5 and 2 % of the bytes
    compositions right  smoothed scores and fewer bits, on pages whose values are to the right of their tags
    compositions        the same on pages of both shapes
    shorter prompts     methods that reduce the prompt, on a fifth of the questions
    unknown             compressed before any question is known, then several questions with `extend`; on a fifth
    several             three pages and a question about one of them; on a fifth

The questions are held out: their digits were never trained on. Bytes are the share of the bytes that the vision entries
take in a full bfloat16 cache; all text is kept (scope="vision"). Quantised entries are smaller, so more of them are
kept at equal bytes; their scales and minima are counted. `allocated` is the share that `generate` allocates for the
whole prompt. For methods that reduce the prompt, bytes are the `keep` of their last stage; `held` is what they hold.

A prompt is prefilled once for all methods that do not reduce it, and a method is compiled once for all its keeps.
Results are written after every method, so an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binomtest

import vlkv
from benchmarks.quality_tables import BYTES, DOCUMENTS, EVALUATED, ON_BOTH, ON_ROWS, TUNED, plot, show, write_documents
from vlkv import analysis, policies
from vlkv.compression.sizes import Budget, budget_of
from vlkv.files import write_json
from vlkv.generation.prefill import fill_cache_with
from vlkv.inputs import Inputs
from vlkv.mini import CHECKPOINT, folder, pages
from vlkv.policies import KIVI, AdaKV, AirCache, Policy, Smooth, SnapKV, compose
from vlkv.terminal import track
from vlkv.tools.benching import machine
from vlkv.tools.evaluation.keeps import at_bytes, budget, pool_bytes, relative_size, share_programs

BATCH = 50
_QUICK = {"xla_llvm_disable_expensive_passes": True}  # compiling takes a third less time


class Question(NamedTuple):
    """One or several questions about the same images, with their answers and evidence."""

    images: list[Any]
    texts: list[str]  # several questions are asked separately, from the same compressed cache
    answers: list[str]
    cells: list[tuple[int, ...]]  # evidence of each answer: indices among the vision tokens of all images


class Cell(NamedTuple):
    """One row of the results."""

    name: str
    policy: Policy | str  # or "Oracle"
    bytes: float  # share of the bytes
    bits: int = 16

    @property
    def text(self) -> str:
        """The policy as Python code."""
        return self.policy if isinstance(self.policy, str) else policies.text_of(self.policy)


@dataclasses.dataclass(frozen=True)
class Section:
    """Questions of one kind, and the rows to measure on them."""

    name: str
    kind: str  # of pages.KINDS, or "several"
    plan: tuple[Cell, ...]
    unknown: bool = False  # compress before the question is known
    share: float = 1.0  # of the questions
    new_tokens: int = 8


# --- sections ------------------------------------------------------------------------------------------------------


def published(name: str, share: float, layers: int) -> Policy | None:
    """A method with default settings that keeps all text; None if it cannot reach this share."""
    options: dict[str, Any] = {}
    if name == "avl":
        options = {"core": 0.75 * share}  # the paper's ratio
    elif name in ("lightkv", "tome", "pitome", "tofu"):
        stages = max(3, math.ceil(math.log2(1 / share)))  # each stage merges half at most
        if stages >= layers:
            return None
        if stages > 3:
            options = {"layers": tuple(range(layers - stages, layers))}
            if name == "lightkv":
                options["windows"] = (4, 2, *[1] * (stages - 2))
    return policies.make(name, keep=share, scope="vision", **options)


def compositions() -> dict[str, Policy]:
    """Scores with several kinds of smoothing; `keep` is set later."""
    text = AirCache(keep=0.1, window="text")
    snap = SnapKV(keep=0.1, window=8, kernel=1, scope="vision")
    made: dict[str, Policy] = {
        "AirCache text": text,
        "SnapKV window 8, kernel 7": SnapKV(keep=0.1, window=8, kernel=7, scope="vision"),
    }
    made |= {f"AirCache text, {name}": compose(text, smooth=smooth) for name, smooth in SMOOTHED.items()}
    return made | {
        f"SnapKV window 8, {name}": compose(snap, smooth=SMOOTHED[name]) for name in ("8 before", "8 x 8 before")
    }


# No smoothing, a tuned SnapKV, and the best two with the seed TUNED.
CHOSEN = ("AirCache text", "SnapKV window 8, kernel 7", ON_ROWS, ON_BOTH)


SMOOTHED = {
    "9 tokens": Smooth(9),
    "8 before": Smooth(8, one_sided=True),
    "8 before, max": Smooth(8, one_sided=True, pooling="max"),
    "7 x 7": Smooth((7, 7)),
    "8 x 8 before": Smooth((8, 8), one_sided=True),
    "8 x 8 before, max": Smooth((8, 8), one_sided=True, pooling="max"),
}


def sections(layers: int, seed: int) -> list[Section]:
    """All sections, the most important first; with the seed TUNED they include all compositions."""
    full = Cell("Full", policies.Full(), 1.0)
    random = [Cell("ImgRandom", policies.ImgRandom(keep=b), b) for b in BYTES]
    oracle = [Cell("Oracle", "Oracle", b) for b in (0.1, 0.02)]
    bits = [Cell("KIVI", store, relative_size(store), store.bits) for store in (KIVI(bits=4), KIVI(bits=2))]
    names = [name for name in policies.registry if name not in ("full", "kivi", "random", "imgrandom")]
    # The default settings of AdaKV smooth more than those of SnapKV, so its gain is not only that of budgets per head.
    alike = [
        Cell("SnapKV smoothed as AdaKV", SnapKV(keep=b, kernel=AdaKV.kernel, pooling=AdaKV.pooling, scope="vision"), b)
        for b in BYTES
    ]

    def default(chosen: Iterable[str], shares: Iterable[float]) -> list[Cell]:
        made = ((name, share, published(name, share, layers)) for name in chosen for share in shares)
        return [Cell(type(policy).__name__, policy, share) for _, share, policy in made if policy is not None]

    def composed(chosen: Iterable[str], bits: Iterable[int], shares: Iterable[float]) -> list[Cell]:
        every = compositions()
        return [Cell(name, at_bytes(every[name], b, n), b, n) for name in chosen for n in bits for b in shares]

    few = default(("snapkv", "aircache", "h2o", "prefixkv", "csp"), (0.2, 0.1, 0.05))
    few += composed(CHOSEN[:3], (4,), (0.1, 0.02))
    best = composed(compositions() if seed == TUNED else CHOSEN, (16, 4), (0.02, 0.01))
    return [
        Section("digits", "digits", (full,), new_tokens=40),
        Section("baselines", "ledger", (full, *oracle, *random, Cell("Downsample", downsample(), 0.25))),
        Section("methods", "ledger", (full, *bits, *default(filter(_evicts, names), BYTES), *alike)),
        Section("compositions right", "right", (full, *best)),
        Section("compositions", "ledger", (full, *best)),
        Section("shorter prompts", "ledger", (full, *default((n for n in names if not _evicts(n)), BYTES)), share=0.2),
        Section("unknown", "ledger", (full, *few), unknown=True, share=0.2),
        Section("several", "several", (full, *few), share=0.2),
    ]


def downsample() -> Policy:
    """Reduces an image of 24 x 24 tokens to 12 x 12."""
    return policies.Downsample(most=pages.GRID**2 // 4)


def _evicts(name: str) -> bool:
    made = published(name, 0.2, layers=6)
    return made is not None and made.reducer is None


# --- questions ------------------------------------------------------------------------------------------------------


def questions(section: Section, count: int, seed: int) -> list[Question]:
    """The questions of a section; the same seed gives the same questions."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        if section.kind == "several":
            shown, chosen, entry = pages.held_out_set(rng)
            offset = chosen * pages.GRID**2
            cells = [tuple(offset + cell for cell in entry.evidence)]
            made.append(Question([page.image for page in shown], [entry.question], [entry.answer], cells))
        elif section.unknown:
            page, _ = pages.held_out_page(rng, section.kind)
            entries = page.entries[:4]
            columns = ([e.question for e in entries], [e.answer for e in entries], [e.evidence for e in entries])
            made.append(Question([page.image], *columns))
        else:
            page, entry = pages.held_out_page(rng, section.kind)
            made.append(Question([page.image], [entry.question], [entry.answer], [entry.evidence]))
    return made


def evidence(inputs: Inputs, cells: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Mask [B, T] of the prompt tokens that are the vision tokens `cells` of their row."""
    number = np.cumsum(inputs.is_vision, axis=1) - 1
    return np.stack([np.isin(n, c) & v for n, c, v in zip(number, cells, inputs.is_vision, strict=True)])


def targets(answers: Sequence[str], length: int) -> np.ndarray:
    """Token ids [B, S] of the answers and of the end of the sequence, padded with -1."""
    tokenizer = folder.tokenizer()
    ids = [[*tokenizer.encode(answer, add_special_tokens=False).ids, folder.EOS] for answer in answers]
    return np.array([[*row, *[-1] * (length - len(row))] for row in ids], np.int32)


# --- programs ------------------------------------------------------------------------------------------------------

_read = jax.jit(vlkv.read_prompt, compiler_options=_QUICK)


class Seen(NamedTuple):
    """The results of one batch."""

    tokens: np.ndarray  # [B, Q, S]
    log_probability: np.ndarray  # [B, Q]
    recall: np.ndarray  # [B, L, K] share of the first question's evidence that is kept
    held: np.ndarray  # [B] vision entries that are kept, mean over layers and heads


@functools.partial(jax.jit, static_argnames="new_tokens", compiler_options=_QUICK)
def _compress(prompt, policy, table, evidence, key, *, new_tokens: int) -> tuple[vlkv.PackedCache, Any, Any]:
    """Compresses one batch: cache, recall and held of `Seen`. `policy` None: the oracle, with ImgRandom's memory."""
    if policy is None:
        most = policies.ImgRandom(keep=BYTES[0])
        cache = analysis.oracle_cache(prompt, evidence, most, table, new_tokens=new_tokens, key=key)
    else:
        cache = fill_cache_with(prompt, policy, table, new_tokens=new_tokens, key=key)
    held = analysis.held_by_head(cache, prompt.valid.shape[1]) & prompt.is_vision[:, None, None]
    return cache, analysis.evidence_recall(cache, evidence), jnp.mean(jnp.sum(held, axis=-1), axis=(1, 2))


@functools.partial(jax.jit, static_argnames="new_tokens", compiler_options=_QUICK)
def _ask(params, cache, logits, wanted, *, new_tokens: int) -> tuple[Any, Any]:
    """Greedy answers, and the log-probabilities of the right answers."""
    tokens = vlkv.decode(params, cache, logits, sampling=vlkv.Greedy(max_new_tokens=new_tokens))[0]
    return tokens, jnp.sum(vlkv.log_probabilities(params, cache, logits, wanted), axis=1)


_extend = jax.jit(vlkv.extend, compiler_options=_QUICK)


def _answer(params: Any, prompt: vlkv.Prompt, policy: Policy | None, table: Any, batch: Batch, key: Any,
            new_tokens: int) -> Seen:  # fmt: skip
    """Compresses one batch and asks all its questions."""
    capacity = new_tokens + (0 if batch.fed is None else batch.fed[0].tokens.shape[1])
    cache, recall, held = _compress(prompt, policy, table, batch.evidence, key, new_tokens=capacity)
    starts = [(cache, prompt.logits)] if batch.fed is None else [_extend(params, cache, fed) for fed in batch.fed]
    results = [_ask(params, *one, batch.wanted[:, i], new_tokens=new_tokens) for i, one in enumerate(starts)]
    tokens, scores = (np.stack(column, 1) for column in zip(*results, strict=True))
    return Seen(tokens, scores, np.asarray(recall), np.asarray(held))


class Batch(NamedTuple):
    """Questions that are answered together."""

    real: int  # rows without padding
    inputs: Inputs
    fed: tuple[Inputs, ...] | None  # the questions, if they are not part of `inputs`
    wanted: np.ndarray  # [B, Q, S] token ids of the right answers
    evidence: np.ndarray  # [B, T] of the first question
    answers: list[list[str]]  # [B][Q]


def batches(asked: Sequence[Question], processor: Any, section: Section) -> Iterator[Batch]:
    """Batches of all questions; the last one is padded with its last question."""
    size = BATCH if section.kind != "several" else 10
    for begin in range(0, len(asked), size):
        part = asked[begin : begin + size]
        rows = [*part, *[part[-1]] * (size - len(part))]
        images = [row.images for row in rows]
        fed = None
        if section.unknown:
            inputs = processor(images, [row.texts[0] for row in rows], question=False)
            fed = tuple(_extension(processor, [row.texts[i] for row in rows]) for i in range(len(rows[0].texts)))
        else:
            inputs = processor(images, [row.texts[0] for row in rows])
        wanted = [targets([row.answers[i] for row in rows], section.new_tokens) for i in range(len(rows[0].texts))]
        yield Batch(len(part), inputs, fed, np.stack(wanted, 1), evidence(inputs, [row.cells[0] for row in rows]),
                    [row.answers for row in part])  # fmt: skip


def _extension(processor: Any, texts: Sequence[str]) -> Inputs:
    """The part of the prompts after the image."""
    prompts = [processor.prompts.write(text, 1, 0) for text in texts]
    start = prompts[0][: prompts[0].index("<image>") + len("<image>")]
    return processor.extension([start] * len(prompts), prompts)


def measure(params: Any, processor: Any, section: Section, count: int, seed: int, done: Done) -> None:
    """Measures the rows of a section that the results do not contain yet."""
    todo = [cell for cell in section.plan if done.find(section, cell, count, seed) is None]
    if not todo:
        return
    made = list(batches(questions(section, count, seed), processor, section))
    layers, length = params.config.decoder.layers, made[0].inputs.valid.shape[1]
    evicting = [cell.policy for cell in todo if isinstance(cell.policy, Policy)]
    programs = dict(zip(evicting, share_programs(evicting), strict=True))
    whole: list[Any] = []
    for cell in track(todo, section.name):
        policy = cell.policy
        reduces = isinstance(policy, Policy) and policy.reducer is not None
        if not whole and not reduces:
            whole = [_read(params, batch.inputs) for batch in made]
        random = policies.ImgRandom(keep=cell.bytes)
        program = None if isinstance(policy, str) else programs[policy]
        seen, processed = [], []
        for number, batch in enumerate(made):
            key = jax.random.key(number)
            prompt = _read(params, batch.inputs, policy, key=key) if reduces else whole[number]
            table: Budget | None  # as arrays, so that one program can be used for every keep
            if program is None:
                table = budget_of(random, layers=layers, most=length, text=prompt.max_text)
            else:
                table = budget(policy, program, prompt)
            out = _answer(params, prompt, program, table, batch, key, section.new_tokens)
            seen.append(Seen(*(x[: batch.real] for x in out)))
            processed.append(np.mean([np.asarray(layer.valid)[: batch.real].sum(1) for layer in prompt.layers], 0))
        joined = jax.tree.map(lambda *parts: np.concatenate(parts), *seen)
        done.add(section, cell, count, seed, summary(params, processor, cell, made, joined, np.concatenate(processed)))


def summary(
    params: Any, processor: Any, cell: Cell, made: list[Batch], seen: Seen, processed: np.ndarray
) -> dict[str, Any]:
    """A row of the results: exact match with its interval, digits by place, perplexity, evidence recall, and cost."""
    wanted = [answer for batch in made for row in batch.answers for answer in row]
    answers = [str(text) for row in seen.tokens for text in processor.decode(row)]
    right = np.array([a == b for a, b in zip(answers, wanted, strict=True)])
    interval = binomtest(int(right.sum()), len(right)).proportion_ci(0.95, method="wilson")
    scored = sum(len(answer.split()) + 1 for answer in wanted)
    shape = made[0].inputs
    policy = policies.ImgRandom(keep=cell.bytes) if isinstance(cell.policy, str) else cell.policy
    allocated = [pool_bytes(p, params.config, shape) for p in (policy, policies.Full())]
    vision = shape.is_vision.sum(1)[0]
    return {
        "name": cell.name,
        "bits": cell.bits,
        "policy": cell.text,
        "exact": float(right.mean()), "low": interval.low, "high": interval.high,
        "places": by_place(answers, wanted),
        "perplexity": math.exp(-float(seen.log_probability.sum()) / scored),
        "recall": np.round(seen.recall.mean(0), 4).tolist(),
        "held": float(seen.held.mean() / vision),
        "allocated": allocated[0] / allocated[1],
        "processed": float(processed.mean() / shape.valid.sum(1).mean()),
        "right": "".join("01"[int(r)] for r in right),
        "said": answers,
    }  # fmt: skip


def by_place(answers: Sequence[str], wanted: Sequence[str]) -> list[float]:
    """For each place, the share of right digits among the answers that have a digit there."""
    places: list[list[bool]] = []
    for answer, truth in zip(answers, wanted, strict=True):
        digits = answer.split()
        for place, digit in enumerate(truth.split()):
            if place == len(places):
                places.append([])
            places[place].append(place < len(digits) and digits[place] == digit)
    return [round(float(np.mean(place)), 4) for place in places]


# --- results --------------------------------------------------------------------------------------------------------


class Done:
    """The results file: rows by section, policy and bytes."""

    def __init__(self, path: Path | None, command: str) -> None:
        self.path = path
        self.content: dict[str, Any] = {"command": command, "machine": machine.describe(), "rows": []}
        if path is not None and path.exists():
            self.content["rows"] = json.loads(path.read_text())["rows"]

    def find(self, section: Section, cell: Cell, count: int, seed: int) -> dict[str, Any] | None:
        """The row of a cell; None if it has not been measured."""
        wanted = (section.name, cell.text, cell.bytes, count, seed)
        return next((row for row in self.content["rows"] if _identity(row) == wanted), None)

    def add(self, section: Section, cell: Cell, count: int, seed: int, row: dict[str, Any]) -> None:
        """Adds a row and its difference from the full cache, and writes the file."""
        about = {"section": section.name, "kind": section.kind, "bytes": cell.bytes, "questions": count, "seed": seed}
        row = {**about, **row}
        full = self.find(section, Cell("Full", policies.Full(), 1.0), count, seed) or row
        row["loss"], row["loss_low"], row["loss_high"] = paired(full["right"], row["right"])
        row["same_as_full"] = float(np.mean([a == b for a, b in zip(row["said"], full["said"], strict=True)]))
        if row is not full:
            del row["said"]
        self.content["rows"].append(row)
        if self.path is not None:
            write_json(self.path, self.content)


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["section"], row["policy"], row["bytes"], row["questions"], row["seed"]


def paired(full: str, other: str) -> tuple[float, float, float]:
    """Mean difference between two strings of 0 (wrong) and 1 (right) for the same questions, with its 95 % interval."""
    difference = np.array([int(a) - int(b) for a, b in zip(full, other, strict=True)], float)
    margin = 1.96 * difference.std(ddof=1) / math.sqrt(len(difference))
    return float(difference.mean()), float(difference.mean() - margin), float(difference.mean() + margin)


def main() -> None:
    """Measures, writes the JSON, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", help="sections by their name or its beginning (default: all)")
    parser.add_argument("--questions", type=int, default=500, help="number of questions (default: 500)")
    parser.add_argument("--seed", type=int, default=EVALUATED)
    parser.add_argument("--policy", help="only policies that contain this one, such as AirCache")
    parser.add_argument("--out", type=Path, help="file of results as JSON, from which a run resumes")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw quality against bytes")
    parser.add_argument("--documents", action="store_true", help=f"write the tables into {' and '.join(DOCUMENTS)}")
    args = parser.parse_args()
    params, processor = vlkv.load(CHECKPOINT)
    done = Done(args.out, " ".join(["python -m benchmarks.quality", *sys.argv[1:]]))
    for section in sections(params.config.decoder.layers, args.seed):
        if args.section and not any(section.name.startswith(word) for word in args.section):
            continue
        plan = tuple(c for c in section.plan if args.policy in (None, *re.findall(r"\w+", c.text)) or c.bytes == 1)
        count = round(args.questions * section.share)
        measure(params, processor, dataclasses.replace(section, plan=plan), count, args.seed, done)
        jax.clear_caches()
    show(done.content["rows"])
    if args.plot:
        plot(done.content["rows"], args.plot)
    if args.documents:
        root = Path(__file__).parent.parent
        write_documents(done.content["rows"], [root / name for name in DOCUMENTS])


if __name__ == "__main__":
    main()
