"""MileBench (Song et al. 2024), the benchmark of CSP: its folders to questions for `vlkv eval`, and its own scores.

    python -m benchmarks.milebench MileBench milebench.jsonl [--dataset TQA ...] [--images 30]
    vlkv eval milebench.jsonl --model DIR --policy full csp --keep 0.2 --out results
    python -m benchmarks.milebench --score milebench.jsonl results/results.json

The first reads MileBench/<dataset>/<dataset>.json and images/ beside it. A prompt is the task's instruction and the
context with every picture in its place; choices follow under letters. Where MileBench's own code cuts a prompt that is
too long for a model, `vlkv eval` refuses it: leave such rows out with --images.

The scores are those of MileBench's evaluate.py: accuracy of choices, found in the answer by letter and text, then by
text, then by letter; of needles, a word of the answer; of MMCoQA, a part of it; ROUGE-L for open questions. Two
things differ: an empty answer is wrong (there it counts as C), and ROUGE-L is that of rouge-score, which counts a word
as often as it stands there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rouge_score.rouge_scorer import RougeScorer

from vlkv.errors import InputError
from vlkv.files import read_json, read_text, replacing
from vlkv.terminal import guarded

_PLACE = re.compile(r"\{(?:image|table)#(\d+)\}")
_WITHOUT_LETTERS = "GPR1200"  # has more choices than there are letters
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


def rows(source: Path, datasets: Sequence[str] = (), images: int | None = None) -> Iterator[dict[str, Any]]:
    """One row for `vlkv eval` for each sample.

    Args:
        source: the folder with a folder for each dataset.
        datasets: which of them; none: all that are there.
        images: leave out samples with more images than that.

    Raises:
        InputError: no such dataset, or a file that is not laid out as MileBench's are.
    """
    names = datasets or sorted(path.name for path in source.glob("*") if (path / f"{path.name}.json").is_file())
    if not names:
        raise InputError(f"{source}: holds no folder of MileBench, such as TQA with TQA.json and images")
    for name in names:
        file = source / name / f"{name}.json"
        content = read_json(file)
        if content is None:
            raise InputError(f"{file}: no such file")
        for sample in content.get("data", ()):
            try:
                row = _row(name, content["meta_data"], sample, file.parent / "images")
            except (KeyError, IndexError, TypeError) as error:
                raise InputError(f"{file}: a sample without {error}: not as MileBench lays it out") from None
            if images is None or len(row["images"]) <= images:
                yield row


def _row(dataset: str, about: Mapping[str, Any], sample: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    instance, instructions = sample["task_instance"], about["task_instruction"]
    which = sample["task_instruction_id"]
    instruction = instructions[which if isinstance(instructions, list) or which in instructions else str(which)]
    paths, context = list(instance["images_path"]), str(instance["context"])
    shown = [int(number) - 1 for number in _PLACE.findall(context)]
    if not all(0 <= i < len(paths) for i in shown):
        raise InputError(f"{dataset}, sample {sample['sample_id']}: its context names a picture that it has not")
    before = [i for i in range(len(paths)) if i not in shown]
    question = f"{instruction}\n{'<image>' * len(before)}{_PLACE.sub('<image>', context)}"
    row: dict[str, Any] = {"id": f"{dataset}/{sample['sample_id']}"}
    answer, choices = str(sample["response"]), instance.get("choice_list")
    metric = "rouge-l" if about["question_type"] == "open-ended" else "choice"
    if "NeedleInAHaystack" in dataset or "MMCoQA" in dataset:
        metric = "needle" if "NeedleInAHaystack" in dataset else "part"
    if choices is not None:
        choices = [str(choice) for choice in choices]
        letters = [f"{chr(65 + i)}. " if dataset != _WITHOUT_LETTERS else "" for i in range(len(choices))]
        listed = "\n".join(letter + choice for letter, choice in zip(letters, choices, strict=True))
        question += f"\nChoice list: \n{listed}\nYour answer is: "
        row["choices"] = choices
    if metric == "choice" and normalise(answer) not in map(normalise, choices or ()):
        raise InputError(f"{dataset}, sample {sample['sample_id']}: the answer {answer!r} is none of its choices")
    images = [str(folder / paths[i]) for i in before + shown]
    return {**row, "dataset": dataset, "metric": metric, "images": images, "question": question, "answer": answer}


def score(asked: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Per policy: the mean score of each dataset, and of all datasets under "mean".

    Args:
        asked: the rows.
        results: what `vlkv eval` wrote about them.

    Raises:
        InputError: results of other questions.
    """
    said = {answer["id"]: answer["said"] for answer in results["answers"]}
    scores: dict[str, dict[str, float]] = {}
    for i, policy in enumerate(row["policy"] for row in results["rows"]):
        found = defaultdict(list)
        for row in asked:
            if row["id"] not in said:
                raise InputError(f"the results have no answer to {row['id']}: they are of other questions")
            found[row["dataset"]].append(judge(row, said[row["id"]][i]))
        means = {name: sum(values) / len(values) for name, values in found.items()}
        scores[policy] = {**means, "mean": sum(means.values()) / len(means)}
    return scores


def judge(row: Mapping[str, Any], said: str) -> float:
    """What an answer to a row is worth, from 0 to 1."""
    ours, wanted = normalise(said), normalise(row["answer"])
    if not ours:
        return 0.0
    if row["metric"] == "rouge-l":
        return RougeScorer(["rougeL"]).score(wanted, ours)["rougeL"].fmeasure
    if row["metric"] == "needle":
        return float(wanted in ours.split())
    if row["metric"] == "part":
        return float(wanted in ours)
    choices = [normalise(choice) for choice in row["choices"]]
    return float(pick(ours, choices) == chr(65 + choices.index(wanted)))


def pick(said: str, choices: Sequence[str]) -> str:
    """The letter of the choice that an answer names, both normalised; several letters where it names none clearly."""
    letters = [chr(65 + i) for i in range(len(choices))]
    named = [normalise(f"{letter} {choice}") for letter, choice in zip(letters, choices, strict=True)]
    for text, wanted in ((said, named), (said.replace(" ", ""), [choice.replace(" ", "") for choice in choices])):
        places = [(text.find(one), i) for i, one in enumerate(wanted) if one in text]
        if places:
            return letters[min(places)[1]]
    return "".join(letter.upper() for letter in said if letter.upper() in letters)


def normalise(text: str) -> str:
    """As the evaluation of VQA does: small letters, no punctuation, no full stop unless a digit follows."""
    text = re.sub(r"[\n\t]", " ", text).strip()
    grouped = re.search(r"\d,\d", text) is not None
    made = text
    for mark in _PUNCTUATION:
        apart = grouped or f"{mark} " in text or f" {mark}" in text
        made = made.replace(mark, "" if apart else " ")
    return re.sub(r"\.(?!\d)", "", made).strip("'").strip('"').strip().lower()


def main(argv: Sequence[str] | None = None) -> int:
    """Converts, or scores with --score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, metavar="SRC", help="the folder of MileBench; with --score the JSONL")
    parser.add_argument("second", type=Path, metavar="OUT.jsonl", help="to write; with --score results.json")
    parser.add_argument("--dataset", nargs="+", default=[], metavar="NAME", help="only these")
    parser.add_argument("--images", type=int, metavar="N", help="leave out samples with more images")
    parser.add_argument("--score", action="store_true", help="score what `vlkv eval` has answered")
    args = parser.parse_args(argv)
    return guarded(lambda: _score_files(args) if args.score else _convert(args))


def _convert(args: argparse.Namespace) -> str:
    out, count = args.second, 0
    with replacing(out) as partial, partial.open("w", encoding="utf-8") as file:
        for row in rows(args.first, args.dataset, args.images):
            images = [os.path.relpath(image, out.parent) for image in row["images"]]
            file.write(json.dumps({**row, "images": images}, ensure_ascii=False) + "\n")
            count += 1
    return f"{count} questions in {out}"


def _score_files(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    text, results = read_text(args.first), read_json(args.second)
    if text is None or results is None:
        raise InputError(f"{args.first if text is None else args.second}: no such file")
    return score([json.loads(line) for line in text.splitlines() if line.strip()], results)


if __name__ == "__main__":
    sys.exit(main())
