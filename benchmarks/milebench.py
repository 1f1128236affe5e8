"""MileBench (Song et al. 2024), the benchmark of CSP: converts it to questions for `vlkv eval`, and scores the answers.

    python -m benchmarks.milebench MileBench milebench.jsonl [--dataset TQA ...] [--context 4000 --model DIR]
    vlkv eval milebench.jsonl --model DIR --policy full csp --keep 0.2 --out results
    python -m benchmarks.milebench --score milebench.jsonl results/results.json

The first command reads MileBench/<dataset>/<dataset>.json and the images beside it. A prompt is the task's instruction
and the context with every image in its position; choices follow with letters. With --context, the beginning of a prompt
that is too long is cut off, as in MileBench's own code: the instruction is kept, and from the end of the context as
many whole pieces (text between two images, or an image) as fit. MileBench counts neither the chat template nor the
answer, so choose a lower limit than the model's: CSP's limit is 4096 tokens.

Scores are computed as in MileBench's evaluate.py. For choices: accuracy, where a choice is searched in the answer by
letter and text, then by text, then by letter; for needles: whether the expected word is in the answer; for MMCoQA:
whether the expected text is in it; for open questions: ROUGE-L. Two things differ: an empty answer is wrong (MileBench
counts it as C), and ROUGE-L is that of rouge-score, which counts a word as often as it occurs. T-1 to IR are the
columns of CSP's Table 1: means over the data sets of a task.
"""

import argparse
import json
import os
import re
import statistics
import string
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vlkv import loading
from vlkv.errors import InputError
from vlkv.files import read_text, replacing, require_json
from vlkv.processing.tokenizer import TextTokenizer
from vlkv.terminal import guarded
from vlkv.tools.evaluation.protocols import strip_punctuation

_PLACE = re.compile(r"\{(?:image|table)#(\d+)\}")
_WITHOUT_LETTERS = "GPR1200"  # has more choices than there are letters
DATA: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("datasets.toml").read_text())
TASKS: dict[str, list[str]] = DATA["milebench"]


class Limit(NamedTuple):
    """The limit on the length of a prompt."""

    context: int  # tokens of instruction, text and images
    image: int  # tokens of an image
    tokenizer: TextTokenizer

    def cut(self, instruction: str, context: str) -> str:
        """The end of the context that fits beside the instruction; raises InputError if nothing fits."""
        encode = partial(self.tokenizer.encode, add_special=False)
        remaining = self.context - len(encode(instruction))
        if remaining < 1:
            raise InputError(f"--context {self.context} does not hold the instruction: {instruction[:60]!r}")
        kept, pieces = "", context.split("<image>")[::-1]
        for i, piece in enumerate(pieces):
            ids = encode(piece)
            if len(ids) > remaining:
                return kept or str(self.tokenizer.decode(ids[-remaining:]))
            kept, remaining = piece + kept, remaining - len(ids)
            if i == len(pieces) - 1 or self.image > remaining:
                break
            kept, remaining = f"<image>{kept}", remaining - self.image
        return kept


def rows(source: Path, datasets: Sequence[str] = (), limit: Limit | None = None) -> Iterator[dict[str, Any]]:
    """One row for `vlkv eval` for each sample of the data sets (default: all that the folder contains).

    Raises:
        InputError: unknown dataset, or a file that is not in MileBench's format.
    """
    names = datasets or sorted(path.name for path in source.glob("*") if (path / f"{path.name}.json").is_file())
    if not names:
        raise InputError(f"{source}: contains no folder of MileBench, such as TQA with TQA.json and images")
    for name in names:
        file = source / name / f"{name}.json"
        content = require_json(file)
        for sample in content.get("data", ()):
            try:
                yield _row(name, content["meta_data"], sample, file.parent / "images", limit)
            except (KeyError, IndexError, TypeError) as error:
                raise InputError(f"{file}: a sample without {error}, so not MileBench's format") from None


def _row(
    dataset: str, about: Mapping[str, Any], sample: Mapping[str, Any], folder: Path, limit: Limit | None
) -> dict[str, Any]:
    instance, instructions = sample["task_instance"], about["task_instruction"]
    which = sample["task_instruction_id"]
    instruction = instructions[which if isinstance(instructions, list) or which in instructions else str(which)]
    paths, context = list(instance["images_path"]), str(instance["context"])
    shown = [int(number) - 1 for number in _PLACE.findall(context)]
    if not all(0 <= i < len(paths) for i in shown):
        raise InputError(f"{dataset}, sample {sample['sample_id']}: its context names an image that it does not have")
    before = [i for i in range(len(paths)) if i not in shown]
    context = f"{'<image>' * len(before)}{_PLACE.sub('<image>', context)}"
    answer, choices = str(sample["response"]), [str(choice) for choice in instance.get("choice_list") or ()]
    metric = "rouge-l" if about["question_type"] == "open-ended" else "choice"
    if "NeedleInAHaystack" in dataset or "MMCoQA" in dataset:
        metric = "needle" if "NeedleInAHaystack" in dataset else "part"
    if choices:
        letters = "" if dataset == _WITHOUT_LETTERS else string.ascii_uppercase
        listed = (f"{letters[i]}. {choice}" if letters else choice for i, choice in enumerate(choices))
        context += "\n".join(["\nChoice list: ", *listed, "Your answer is: "])
    if metric == "choice" and normalise(answer) not in map(normalise, choices):
        raise InputError(f"{dataset}, sample {sample['sample_id']}: the answer {answer!r} is not one of its choices")
    if limit is not None:
        context = limit.cut(instruction, context)
    images = [str(folder / paths[i]) for i in before + shown]
    images = images[len(images) - context.count("<image>") :]
    about = {"id": f"{dataset}/{sample['sample_id']}", "dataset": dataset, "metric": metric, "images": images}
    about |= {"choices": choices} if choices else {}
    return {**about, "question": f"{instruction}\n{context}", "answer": answer}


def score(
    asked: Sequence[Mapping[str, Any]], results: Mapping[str, Any], judge: Callable[[Mapping[str, Any], str], float]
) -> dict[str, dict[str, float]]:
    """Per policy: the mean score of each dataset, of each of `TASKS`, and of all datasets under "mean".

    `judge` computes a score from 0 to 1 from a row and an answer.

    Raises:
        InputError: the results belong to other questions.
    """
    responses = {answer["id"]: answer["said"] for answer in results["answers"]}
    scores: dict[str, dict[str, float]] = {}
    for i, policy in enumerate(row["policy"] for row in results["rows"]):
        values = defaultdict(list)
        for row in asked:
            if row["id"] not in responses:
                raise InputError(f"the results have no answer to {row['id']}: they belong to other questions")
            values[row["dataset"]].append(judge(row, responses[row["id"]][i]))
        means = {name: statistics.fmean(each) for name, each in values.items()}
        scores[policy] = {**means, **_tasks(means), "mean": statistics.fmean(means.values())}
    return scores


def _tasks(means: Mapping[str, float]) -> dict[str, float]:
    """Mean of each task over its datasets that were asked; names are compared by their letters and digits."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    known = {plain(name): value for name, value in means.items()}
    values = {task: [known[plain(name)] for name in names if plain(name) in known] for task, names in TASKS.items()}
    return {task: statistics.fmean(each) for task, each in values.items() if each}


def judge(row: Mapping[str, Any], response: str) -> float:
    """Score of an answer to a row, from 0 to 1."""
    ours, wanted = normalise(response), normalise(row["answer"])
    if not ours:
        return 0.0
    if row["metric"] == "rouge-l":
        from rouge_score.rouge_scorer import RougeScorer  # takes a second

        return RougeScorer(["rougeL"]).score(wanted, ours)["rougeL"].fmeasure
    if row["metric"] == "needle":
        return float(wanted in ours.split())
    if row["metric"] == "part":
        return float(wanted in ours)
    choices = [normalise(choice) for choice in row["choices"]]
    return float(pick(ours, choices) == chr(65 + choices.index(wanted)))


def pick(response: str, choices: Sequence[str]) -> str:
    """Letter of the choice that an answer names (both normalised); several letters if it names none clearly."""
    letters = [chr(65 + i) for i in range(len(choices))]
    named = [normalise(f"{letter} {choice}") for letter, choice in zip(letters, choices, strict=True)]
    for text, wanted in ((response, named), (response.replace(" ", ""), [c.replace(" ", "") for c in choices])):
        places = [(text.find(choice), i) for i, choice in enumerate(wanted) if choice in text]
        if places:
            return letters[min(places)[1]]
    return "".join(letter.upper() for letter in response if letter.upper() in letters)


def normalise(text: str) -> str:
    """Normalises as VQA's evaluation does: lower case, no punctuation, no full stop unless a digit follows."""
    return strip_punctuation(re.sub(r"[\n\t]", " ", text).strip()).strip("'").strip('"').strip().lower()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, metavar="SRC", help="the folder of MileBench; with --score the JSONL")
    parser.add_argument("second", type=Path, metavar="OUT.jsonl", help="to write; with --score results.json")
    parser.add_argument("--dataset", nargs="+", default=[], metavar="NAME", help="datasets to convert (default: all)")
    parser.add_argument("--context", type=int, metavar="N", help="limit on tokens of a prompt; needs --model")
    parser.add_argument("--model", metavar="DIR", help="folder whose tokenizer counts tokens")
    parser.add_argument("--image-tokens", type=int, default=576, metavar="N", help="tokens of an image (default: 576)")
    parser.add_argument("--score", action="store_true", help="score the answers of `vlkv eval`")
    args = parser.parse_args(argv)
    if args.score:
        return guarded(lambda: score_files(args.first, args.second, judge))
    return guarded(lambda: _convert(args))


def _convert(args: argparse.Namespace) -> str:
    limit = None
    if args.context is not None:
        if args.model is None:
            raise InputError("--context needs --model, whose tokenizer counts tokens")
        limit = Limit(args.context, args.image_tokens, loading.load_processor(args.model).tokenizer)
    return write(args.second, rows(args.first, args.dataset, limit))


def write(out: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Writes rows as JSON lines, with images relative to the file."""
    count = 0
    with replacing(out) as partial, partial.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, start=1):  # noqa: B007 (the last number is returned)
            images = [os.path.relpath(image, out.parent) for image in row.get("images", ())]
            file.write(json.dumps({**row, **({"images": images} if images else {})}, ensure_ascii=False) + "\n")
    return f"{count} questions in {out}"


def score_files(
    questions: Path, answers: Path, judge: Callable[[Mapping[str, Any], str], float]
) -> dict[str, dict[str, float]]:
    """The scores of `score`, from the JSON lines of `write` and the results of `vlkv eval`."""
    text, results = read_text(questions), require_json(answers)
    if text is None:
        raise InputError(f"{questions}: no such file")
    return score([json.loads(line) for line in text.splitlines() if line.strip()], results, judge)


if __name__ == "__main__":
    sys.exit(main())
