"""How well the miniature reads from a compressed cache: every policy at several values of keep, with 95 % intervals.

    python -m benchmarks.quality [--all] [--questions 500] [--out benchmarks/results/quality.json]

The questions are held out: their digits were never trained on. A batch is read once for all methods that leave the
prompt whole, and compressed in every way. Beside exact match stand the agreement with the full cache's own answers
(exact match, ROUGE-L), the perplexity of the true answer, and what it cost: bytes of the cache as allocated and tokens
processed while reading, both as shares of the full cache's. A support-vector classifier trained on the same digits
says how well digits of this kind can be read at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer
from scipy.stats import binomtest
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from tqdm import tqdm

import vlkv
from vlkv import policies
from vlkv.benching import machine
from vlkv.mini import CHECKPOINT, folder, pages
from vlkv.policies.reducing import ReducingPolicy

COMMON = ("random", "streamingllm", "h2o", "snapkv", "pyramidkv", "aircache", "prefixkv")
KEEPS = (0.5, 0.2, 0.1, 0.05, 0.01)
BATCH = 50
_SAMPLING = vlkv.Greedy(max_new_tokens=40)


def main() -> None:
    """Runs, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every method, not only the eight of the demonstration")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    args = parser.parse_args()
    samples = list(pages.held_out(args.questions, args.seed))
    names = policies.registry if args.all else COMMON
    every = "--all " if args.all else ""
    result = {
        "command": f"python -m benchmarks.quality {every}--questions {args.questions} --seed {args.seed}",
        "machine": machine.describe(),
        "questions": len(samples),
        "classifier": classifier_accuracy(),
        "rows": measure(samples, names),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def planned(names: Iterable[str], layers: int) -> list[policies.Policy]:
    """Every method at every keep that it can have."""
    plan: list[policies.Policy] = [policies.Full()]
    for name in names:
        method = policies.named(name)
        if issubclass(method, policies.KIVI):
            plan += [method(bits=bits) for bits in (4, 2)]
        elif not issubclass(method, policies.Full):
            made = (make(name, keep, layers) for keep in KEEPS)
            plan += [policy for policy in made if policy is not None]
    return plan


def make(name: str, keep: float, layers: int) -> policies.Policy | None:
    """A method with the options that its papers give it at this keep; None where it cannot keep so little."""
    options: dict[str, Any] = {}
    if name == "avl":
        options = {"core": 0.75 * keep}  # as in the paper's settings
    elif name in ("lightkv", "tome", "pitome", "tofu"):
        stages = max(3, math.ceil(math.log2(1 / keep)))  # each merges half at most
        if stages >= layers:
            return None
        if stages > 3:
            options = {"layers": tuple(range(layers - stages, layers))}
            if name == "lightkv":
                options["windows"] = (4, 2, *[1] * (stages - 2))
    return policies.make(name, keep=keep, scope="vision", **options)


def measure(samples: Sequence[pages.Sample], names: Iterable[str]) -> list[dict[str, Any]]:
    """One row per policy and keep."""
    params, processor = vlkv.load(CHECKPOINT)
    plan = planned(names, params.config.decoder.layers)
    read_prompt = jax.jit(vlkv.read_prompt)
    fill_cache = jax.jit(vlkv.fill_cache, static_argnames="new_tokens")
    decode = jax.jit(vlkv.decode, static_argnames="sampling")
    score = jax.jit(vlkv.log_probabilities)
    batches = []
    for begin in range(0, len(samples), BATCH):
        batch = samples[begin : begin + BATCH]
        padded = [*batch, *[batch[-1]] * (BATCH - len(batch))]
        inputs = processor([s.image for s in padded], [s.question for s in padded])
        targets = answers_as_tokens([s.answer for s in padded])
        batches.append((len(batch), inputs, targets, read_prompt(params, inputs)))
    seen: dict[policies.Policy, Seen] = {policy: Seen() for policy in plan}
    for policy in tqdm(plan, unit="policy"):
        into = seen[policy]
        for number, (count, inputs, targets, whole) in enumerate(batches):
            prompt = whole if policy.reducer is None else read_prompt(params, inputs, policy)
            cache = fill_cache(prompt, policy, new_tokens=_SAMPLING.max_new_tokens, key=jax.random.key(number))
            tokens, _ = decode(params, cache, prompt.logits, sampling=_SAMPLING)
            into.answers += processor.decode(tokens)[:count]
            into.log_probability += float(np.asarray(score(params, cache, prompt.logits, targets))[:count].sum())
            into.targets += int((targets[:count] >= 0).sum())
            into.bytes = cache.bytes
            into.processed += sum(int(layer.valid[:count].sum()) for layer in prompt.layers)
        jax.clear_caches()  # a process may hold only so many compiled programs
    truth = [sample.answer for sample in samples]
    return [summary(policy, seen[policy], truth, seen[plan[0]]) for policy in plan]


@dataclasses.dataclass
class Seen:
    """What is gathered of one policy over the batches."""

    answers: list[str] = dataclasses.field(default_factory=list)
    log_probability: float = 0.0
    targets: int = 0
    bytes: int = 0
    processed: int = 0


def answers_as_tokens(answers: Sequence[str]) -> np.ndarray:
    """[B, S] token ids with the end of the sequence, -1 where there is none."""
    tokenizer = folder.tokenizer()
    ids = [[*tokenizer.encode(answer, add_special_tokens=False).ids, folder.EOS] for answer in answers]
    return np.array([[*row, *[-1] * (_SAMPLING.max_new_tokens - len(row))] for row in ids], np.int32)


def summary(policy: policies.Policy, seen: Seen, truth: Sequence[str], full: Seen) -> dict[str, Any]:
    """Exact match with its interval, digits read right, agreement with the full cache's own answers, and the cost."""
    exact = sum(a == t for a, t in zip(seen.answers, truth, strict=True))
    interval = binomtest(exact, len(truth)).proportion_ci(0.95, method="wilson")
    rouge = RougeScorer(["rougeL"])
    pairs = list(zip(seen.answers, full.answers, strict=True))
    return {
        "policy": label(policy),
        "keep": policy.keep,
        "stage": "reduce" if isinstance(policy, ReducingPolicy) else "score",
        "exact": exact / len(truth),
        "low": interval.low,
        "high": interval.high,
        "digits": digit_accuracy(seen.answers, truth),
        "same_as_full": float(np.mean([a == f for a, f in pairs])),
        "rouge_l": float(np.mean([rouge.score(f, a)["rougeL"].fmeasure for a, f in pairs])),
        "perplexity": math.exp(-seen.log_probability / seen.targets),
        "bytes": seen.bytes / full.bytes,
        "processed": seen.processed / full.processed,
    }


def label(policy: policies.Policy) -> str:
    """Its name in the table."""
    return f"KIVI {policy.bits} bits" if isinstance(policy, policies.KIVI) else type(policy).__name__


def digit_accuracy(answers: Sequence[str], truth: Sequence[str]) -> float:
    """Share of the digits asked for that stand at their place in the answer."""
    right = total = 0
    for answer, wanted in zip(answers, truth, strict=True):
        said = answer.split()
        for place, symbol in enumerate(wanted.split()):
            if symbol.isdigit():
                total += 1
                right += place < len(said) and said[place] == symbol
    return right / total


def classifier_accuracy() -> float:
    """A support-vector classifier on the same division of the digits."""
    data, label = load_digits(return_X_y=True)
    train = len(label) - pages.HELD_OUT
    model = SVC(gamma=0.001, C=10).fit(data[:train], label[:train])
    return float(model.score(data[train:], label[train:]))


def show(result: dict[str, Any]) -> None:
    """Policies down, keep across: exact match with its interval; then agreement and cost, one line per keep."""
    rows = {(row["policy"], row["keep"]): row for row in result["rows"]}
    names = list(dict.fromkeys(row["policy"] for row in result["rows"]))
    table = Table("policy", *(f"{keep:.0%}" for keep in (1.0, *KEEPS)), title="exact match, % [95 % interval]")
    for name in names:
        found = (rows.get((name, keep)) for keep in (1.0, *KEEPS))
        table.add_row(name, *("" if row is None else cell(row) for row in found))
    columns = ("policy", "keep", "same, %", "ROUGE-L", "perplexity", "cache, %", "processed, %")
    agreement = Table(*columns, title="against the full cache's own answers; cost against the full cache's")
    for row in result["rows"]:
        agreement.add_row(
            row["policy"], f"{row['keep']:.0%}", f"{100 * row['same_as_full']:.1f}", f"{row['rouge_l']:.3f}",
            f"{row['perplexity']:.3g}", f"{100 * row['bytes']:.1f}", f"{100 * row['processed']:.1f}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    console.print(agreement)
    full = rows["Full", 1.0]
    console.print(
        f"{result['questions']} held-out questions. Digits at their place, full cache: {full['digits']:.1%}; "
        f"support-vector classifier on the same digits: {result['classifier']:.1%}.",
        highlight=False,
    )


def cell(row: dict[str, Any]) -> str:
    """62.4 [58.1, 66.6]"""
    return f"{100 * row['exact']:.1f} \\[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


if __name__ == "__main__":
    main()
