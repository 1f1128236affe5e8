"""LongBench (Bai et al. 2023) and a needle in a haystack for text models: questions for `vlkv eval`, and their scores.

    python -m benchmarks.longbench LongBench hotpotqa.jsonl --dataset hotpotqa --model DIR --context 7500
    python -m benchmarks.longbench --needle ESSAY.txt needle.jsonl --model DIR --context 1000 2000 4000 8000
    vlkv eval hotpotqa.jsonl --model DIR --policy full "prefixkv(budget=128)" --max-new-tokens 32 --out results
    python -m benchmarks.longbench --score hotpotqa.jsonl results/results.json

LongBench is the folder `LongBench` of its repository (v1), with `config/dataset2prompt.json`,
`config/dataset2maxlen.json` and `data/<dataset>.jsonl`. As in its pred.py, the middle of a prompt that is too long is
cut out. The first command prints the --max-new-tokens of the data set. Scores are computed as in its eval.py for
English and code, but ROUGE-L is that of rouge-score. For data sets that LongBench asks without a chat template, use a
model folder without one.

The haystack repeats the essay up to a length and hides one sentence at a depth from 0 (the beginning) to 1; the score
is the share of answers that contain the sentence's answer, by length and depth (PrefixKV, Table 14).
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.milebench import DATA, score_files, write
from vlkv import loading
from vlkv.errors import InputError
from vlkv.files import read_json, read_text
from vlkv.processing.prompts import joined
from vlkv.processing.tokenizer import TextTokenizer
from vlkv.terminal import guarded
from vlkv.tools.evaluation.metrics import METRICS
from vlkv.tools.evaluation.records import Scored

METRIC_OF: dict[str, str] = DATA["longbench"]
_FIRST_LINE = ("trec", "triviaqa", "samsum")  # only the first line of the answer is scored
NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
_QUESTION = "What is the best thing to do in San Francisco? Answer from the text above."
_WANTED = "eat a sandwich and sit in Dolores Park"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def rows(source: Path, dataset: str, tokenizer: TextTokenizer, context: int) -> Iterator[dict[str, Any]]:
    """One row for `vlkv eval` for each sample of a LongBench data set.

    The middle of a prompt of more than `context` tokens is cut out.

    Raises:
        InputError: unknown data set, or a file that is not in LongBench's format.
    """
    if dataset not in METRIC_OF:
        raise InputError(f"--dataset {dataset}: unknown; choose one of {', '.join(METRIC_OF)}")
    lines = read_text(source / "data" / f"{dataset}.jsonl")
    prompt = (read_json(source / "config" / "dataset2prompt.json") or {}).get(dataset)
    if lines is None or prompt is None:
        raise InputError(f"{source}: not LongBench's folder with config/dataset2prompt.json and data/{dataset}.jsonl")
    for number, line in enumerate(filter(str.strip, lines.split("\n")), start=1):
        try:
            sample = json.loads(line)
            parts = {name: sample[name] for name in ("input", "context")}
            text, question = (each.format(**parts) for each in (prompt, prompt.partition("{context}")[2]))
            answers, classes = list(sample["answers"]), sample.get("all_classes") or []
        except (KeyError, ValueError, TypeError) as error:
            file = f"{source}/data/{dataset}.jsonl"
            raise InputError(f"{file}, sample {number}: not LongBench's format ({error})") from None
        ids = tokenizer.encode(text, add_special=False)
        if len(ids) > context:
            half = context // 2
            text = f"{tokenizer.decode(ids[:half])}{tokenizer.decode(ids[-half:])}"
        # What follows the context is the question, unless the cut or a line break between them would change the prompt.
        before = text.removesuffix(question)
        if not question.strip() or joined(before, question) != text:
            before, question = "", text
        about = {"id": f"{dataset}/{number}", "dataset": dataset, "metric": METRIC_OF[dataset], "classes": classes}
        yield {**about, "context": before, "question": question, "answers": answers}


def haystack(
    essay: str, tokenizer: TextTokenizer, lengths: Sequence[int], depths: Sequence[float] = DEPTHS
) -> Iterator[dict[str, Any]]:
    """A row for each length in tokens and each depth; the needle goes after the last sentence before its depth."""
    ids = tokenizer.encode(essay, add_special=False)
    if not len(ids):
        raise InputError("the haystack is empty: give a file with text")
    added = len(tokenizer.encode(f" {NEEDLE} {_QUESTION}", add_special=False))
    for length in lengths:
        text = str(tokenizer.decode(np.resize(ids, max(length - added, 1))))
        for depth in depths:
            place = len(text) if depth == 1 else text.rfind(". ", 0, int(depth * len(text))) + 1
            hidden = " ".join(part for part in (text[:place].strip(), NEEDLE, text[place:].strip()) if part)
            about = {"id": f"{length}/{depth}", "dataset": f"{length} tokens, depth {depth}", "metric": "needle"}
            yield {**about, "context": hidden, "question": _QUESTION, "answer": _WANTED}


def judge(row: Mapping[str, Any], response: str) -> float:
    """Score of an answer to a row, from 0 to 1: the best over the accepted answers."""
    answers = row.get("answers", [row.get("answer")])
    if row["dataset"] in _FIRST_LINE:
        response = response.lstrip("\n").split("\n")[0]
    if row["metric"] in METRICS:
        return METRICS[row["metric"]]([Scored(response, answers)])
    return max(_OWN[row["metric"]](response, answer, row["classes"]) for answer in answers)


def _class(response: str, answer: str, classes: Sequence[str]) -> float:
    """1 / (number of classes that the answer names) if it names the right one. Parts of the right name do not count."""
    named = [name for name in classes if name in response and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def _numbers(response: str, answer: str, classes: Sequence[str]) -> float:
    del classes
    numbers, wanted = re.findall(r"\d+", response), re.findall(r"\d+", answer)[0]
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _code(response: str, answer: str, classes: Sequence[str]) -> float:
    """Similarity between the expected line and the first line of the answer that is not a comment."""
    from rapidfuzz import fuzz

    del classes
    lines = response.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return fuzz.ratio(line, answer) / 100


_OWN = {"class": _class, "paragraph": _numbers, "count": _numbers, "code": _code}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, metavar="SRC", help="LongBench's folder, the essay, or the JSONL")
    parser.add_argument("second", type=Path, metavar="OUT.jsonl", help="to write; with --score results.json")
    parser.add_argument("--dataset", metavar="NAME", help=f"one of {', '.join(METRIC_OF)}")
    parser.add_argument("--needle", action="store_true", help="hide a sentence in the text of SRC")
    parser.add_argument("--model", metavar="DIR", help="folder whose tokenizer counts tokens")
    parser.add_argument("--context", type=int, nargs="+", default=[3500], metavar="N", help="most tokens of a prompt")
    parser.add_argument("--score", action="store_true", help="score the answers of `vlkv eval`")
    args = parser.parse_args(argv)
    return guarded(lambda: score_files(args.first, args.second, judge) if args.score else _convert(args))


def _convert(args: argparse.Namespace) -> str:
    if args.model is None or args.needle == (args.dataset is not None):
        raise InputError("give --model, and either --dataset NAME or --needle")
    if min(args.context) < 2 or (args.dataset and len(args.context) > 1):
        raise InputError("--context must be at least 2, and with --dataset one number")
    tokenizer = loading.load_processor(args.model).tokenizer
    if args.needle:
        essay = read_text(args.first)
        if essay is None:
            raise InputError(f"{args.first}: no such file")
        return write(args.second, haystack(essay, tokenizer, args.context))
    longest = (read_json(args.first / "config" / "dataset2maxlen.json") or {}).get(args.dataset, "(not given)")
    written = write(args.second, rows(args.first, args.dataset, tokenizer, args.context[0]))
    return f"{written}; use --max-new-tokens {longest}"


if __name__ == "__main__":
    sys.exit(main())
