"""Questions from a JSONL file: one object a line, images named relative to the file.

    {"image": "page.png", "question": "what does row one say?", "answers": ["4 2", "42"]}
    {"images": ["a.png", "b.png"], "turns": [{"question": "which is older?", "answer": "the first"}, ...]}

`image` may be a list and `answers` a single string; `id` names a row in the results (else its line does). Any other key
is an error, because it may be one of these misspelt. Notes of your own go under `extra`, which is ignored, as are
`choices`, `dataset` and `metric`, which benchmarks/milebench.py writes for its own scores.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

from vlkv.errors import InputError

_TURN = ("question", "answer", "answers", "extra")
_ROW = ("id", "image", "images", "turns", "choices", "dataset", "metric", *_TURN)


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question and every answer to it that is accepted; the first one is the reference of perplexity."""

    question: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """A row of the file: images, and one question about them or several in turn."""

    line: int
    id: str
    images: tuple[Path, ...]
    turns: tuple[Turn, ...]


def read_records(file: Path) -> list[Record]:
    """All rows of the file; empty lines are skipped.

    Raises:
        InputError: the file or an image is missing, or a line is not what the module says; it names the line.
    """
    if not file.is_file():
        raise InputError(f"{file}: no such file of questions")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise InputError(f"{file}: not a text file; questions are JSON lines in UTF-8") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                records.append(_record(json.loads(line), number, file.parent))
            except json.JSONDecodeError as error:
                raise InputError(f"{file}, line {number}: not valid JSON ({error.msg})") from None
            except RecursionError:
                raise InputError(f"{file}, line {number}: not valid JSON (nested too deep)") from None
            except InputError as error:
                raise InputError(f"{file}, line {number}: {error}") from None
    if not records:
        raise InputError(f"{file}: holds no questions")
    return records


def _record(row: Any, line: int, folder: Path) -> Record:
    if not isinstance(row, dict):
        raise InputError(f"a JSON {type(row).__name__}, expected an object")
    _require_known(row, _ROW)
    if "image" in row and "images" in row:
        raise InputError("has image and images: give one of the two")
    names = row.get("images", row.get("image", []))
    names = [] if names is None else names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) and name for name in names):
        raise InputError("image must be a path, or a list of them")
    images = tuple(folder / name for name in names)
    missing = next((image for image in images if not image.is_file()), None)
    if missing is not None:
        raise InputError(f"{missing}: no such image file")
    turns = row.get("turns")
    if turns is None:
        turns = [{key: value for key, value in row.items() if key in _TURN}]
    elif "question" in row:
        raise InputError("has question and turns: give one of the two")
    if not isinstance(turns, list) or not turns:
        raise InputError("turns must be a list of questions with their answers")
    return Record(line, str(row.get("id", line)), images, tuple(_turn(turn) for turn in turns))


def _require_known(found: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raises InputError for a key that means nothing here."""
    for key in found.keys() - set(known):
        near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
        raise InputError(f"unknown key {key!r}: did you mean {near}? Notes go under extra")


def _turn(turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise InputError(f"a turn is a JSON {type(turn).__name__}, expected an object")
    _require_known(turn, _TURN)
    question = turn.get("question")
    if not isinstance(question, str) or not question.strip():
        raise InputError("no question")
    if "answer" in turn and "answers" in turn:
        raise InputError("has answer and answers: give one of the two")
    answers = turn.get("answers", turn.get("answer", []))
    answers = answers if isinstance(answers, list) else [answers]
    if not answers:
        raise InputError("no answer: give answers, a list of all that are accepted")
    if not all(isinstance(answer, str) for answer in answers):
        raise InputError("answers must be text")
    return Turn(question, tuple(answers))
