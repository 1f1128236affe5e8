"""How well the miniature reads from a compressed cache: every policy at several values of keep, with 95 % intervals.

    python -m benchmarks.quality [--all] [--questions 500] [--out benchmarks/results/quality.json]

The questions are held out: their digits were never trained on. Each batch is read once and compressed in every way.
A support-vector classifier trained on the same digits says how well digits of this kind can be read at all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from tqdm import tqdm

import vlkv
from benchmarks import machine
from vlkv import policies
from vlkv.mini import CHECKPOINT, pages

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


def measure(samples: Sequence[pages.Sample], names: Iterable[str]) -> list[dict[str, Any]]:
    """One row per policy and keep."""
    params, processor = vlkv.load(CHECKPOINT)
    plan: list[policies.Policy] = [policies.Full()]
    for name in names:
        # A-VL's core is three quarters of what it stores, as in the paper's settings.
        options = {keep: {"core": 0.75 * keep} if name == "avl" else {} for keep in KEEPS}
        plan += [policies.make(name, keep=keep, scope="vision", **options[keep]) for keep in KEEPS if name != "full"]
    read_prompt = jax.jit(vlkv.read_prompt)
    fill_cache = jax.jit(vlkv.fill_cache, static_argnames="new_tokens")
    decode = jax.jit(vlkv.decode, static_argnames="sampling")
    answers: dict[policies.Policy, list[str]] = {policy: [] for policy in plan}
    for begin in tqdm(range(0, len(samples), BATCH), unit="batch"):
        batch = samples[begin : begin + BATCH]
        padded = [*batch, *[batch[-1]] * (BATCH - len(batch))]
        inputs = processor([s.image for s in padded], [s.question for s in padded])
        prompt = read_prompt(params, inputs)
        for policy in plan:
            cache = fill_cache(prompt, policy, new_tokens=_SAMPLING.max_new_tokens, key=jax.random.key(begin))
            tokens, _ = decode(params, cache, prompt.logits, sampling=_SAMPLING)
            answers[policy] += processor.decode(tokens)[: len(batch)]
    truth = [sample.answer for sample in samples]
    return [summary(policy, answers[policy], truth, answers[plan[0]]) for policy in plan]


def summary(
    policy: policies.Policy, answers: Sequence[str], truth: Sequence[str], full: Sequence[str]
) -> dict[str, Any]:
    """Exact match with its interval, digits read right, and agreement with the full cache's own answers."""
    exact = sum(a == t for a, t in zip(answers, truth, strict=True))
    interval = binomtest(exact, len(truth)).proportion_ci(0.95, method="wilson")
    return {
        "policy": type(policy).__name__,
        "keep": policy.keep,
        "exact": exact / len(truth),
        "low": interval.low,
        "high": interval.high,
        "digits": digit_accuracy(answers, truth),
        "same_as_full": float(np.mean([a == f for a, f in zip(answers, full, strict=True)])),
    }


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
    """Policies down, keep across: exact match in percent, with the interval."""
    rows = {(row["policy"], row["keep"]): row for row in result["rows"]}
    names = list(dict.fromkeys(row["policy"] for row in result["rows"] if row["policy"] != "Full"))
    full = rows["Full", 1.0]
    table = Table("policy", *(f"{keep:.0%}" for keep in KEEPS), title="exact match, % [95 % interval]")
    table.add_row("Full", cell(full))
    for name in names:
        table.add_row(name, *(cell(rows[name, keep]) for keep in KEEPS))
    console = Console(width=120)
    console.print(table)
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
