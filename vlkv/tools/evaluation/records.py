"""Reads questions from a JSONL file: one object per line, with paths relative to the file.

    {"image": "page.png", "question": "what does row one say?", "answers": ["4 2", "42"]}
    {"images": ["a.png", "b.png"], "turns": [{"question": "which is older?", "answer": "the first"}, ...]}
    {"video": "clip.mp4", "question": "what happens?", "answer": "a goal", "dataset": "sports"}
    {"context": "a long text", "question": "what is the number?", "answer_prefix": " The number is", "answer": "7"}

`image` and `video` may be lists, and `answers` may be a single string. An image may also be a data URI or base64 text.
`context` is text before the first question, with which the images belong to the context. `answer_prefix` is the
beginning of the answer that is given to the model, as in RULER; answers are scored without it. `id` is the name of the
row in the results; without it the line number is used. Some metrics average over each `dataset`. `extra`, for your own
notes, is ignored. So are `choices`, `classes` and `metric`, which `benchmarks/milebench.py` and
`benchmarks/longbench.py` write for their own scores. Any other key is an error, because it may be misspelt.

In a question `<image>` marks the place of an image. A backslash before it, in JSON `\\\\<image>`, makes it text.
"""

import dataclasses
import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlkv.errors import InputError
from vlkv.processing.images import is_embedded

_TURN = ("question", "answer", "answers", "answer_prefix", "extra")
_MEDIA = ("image", "video")
_NOTES = ("choices", "classes", "metric")  # for the scores of others
_ROW = ("id", "image", "images", "video", "videos", "context", "turns", "dataset", *_NOTES, *_TURN)


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question and all accepted answers. The first answer is the reference for perplexity."""

    question: str
    answers: tuple[str, ...]
    answer_prefix: str = ""  # the beginning of the answer, which is given to the model and is not part of `answers`


@dataclasses.dataclass(frozen=True)
class Record:
    """A row of the file: images, videos and a text, and questions about them, asked one after the other."""

    line: int
    id: str
    images: tuple[Path | str, ...]  # a text is an image file itself: a data URI or base64
    turns: tuple[Turn, ...]
    videos: tuple[Path, ...] = ()
    dataset: str = ""
    context: str = ""  # text before the first question


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How questions are answered. Answers are greedy."""

    max_new_tokens: int = 64  # limit on the tokens of an answer
    batch: int = 1  # number of prompts that are prefilled together
    # The policy sees only the prompt before the question; question and answer prefix are added with `extend`.
    query_agnostic: bool = False
    perplexity: bool = False  # also compute the log-probability of the first accepted answer
    temperature: float = 0.0  # if positive, two more answers are drawn with the full cache (`self-rouge-l`)
    frames: int = 8  # limit on the frames of a video
    seed: int = 0  # for random policies and drawn answers

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("batch", 1), ("temperature", 0), ("frames", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)} must be at least {least}")


class Scored(NamedTuple):
    """The answer to one question, with everything that a metric may need."""

    answer: str
    accepted: Sequence[str]
    log_probability: float = 0.0  # of the reference
    tokens: int = 0  # number of tokens of the reference, including the stop token
    question: str = ""
    dataset: str = ""
    images: tuple[Path | str, ...] = ()
    full: tuple[str, ...] = ()  # the answer with the full cache; for the full cache itself, two answers drawn at random


def read_records(file: Path, *, answers: bool = True) -> list[Record]:
    """Reads all rows of the file; with `answers`, every question must have an accepted one. Empty lines are skipped.

    Raises:
        InputError: the file, an image or a video is missing, or a line has another format. The message names the line.
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
                records.append(_record(json.loads(line), number, file.parent, answers))
            except json.JSONDecodeError as error:
                raise InputError(f"{file}, line {number}: not valid JSON ({error.msg})") from None
            except RecursionError:
                raise InputError(f"{file}, line {number}: not valid JSON (nested too deep)") from None
            except InputError as error:
                raise InputError(f"{file}, line {number}: {error}") from None
    if not records:
        raise InputError(f"{file}: contains no questions")
    return records


def _record(row: Any, line: int, folder: Path, answers: bool) -> Record:
    if not isinstance(row, dict):
        raise InputError(f"a JSON {type(row).__name__}, expected an object")
    _require_known(row, _ROW)
    images, videos = (_files(row, kind, folder) for kind in _MEDIA)
    turns = row.get("turns")
    if turns is None:
        turns = [{key: value for key, value in row.items() if key in _TURN}]
    elif beside := [key for key in _TURN if key in row and key != "extra"]:
        raise InputError(f"has {beside[0]} and turns: give one of the two; each turn has its own {beside[0]}")
    if not isinstance(turns, list) or not turns:
        raise InputError("turns must be a list of questions with their answers")
    read = tuple(_turn(turn, answers) for turn in turns)
    context = _text(row, "context")
    return Record(line, str(row.get("id", line)), images, read, videos, str(row.get("dataset", "")), context)


def _files(row: dict[str, Any], kind: str, folder: Path) -> tuple[Any, ...]:
    if kind in row and f"{kind}s" in row:
        raise InputError(f"has {kind} and {kind}s: give one of the two")
    names = row.get(f"{kind}s", row.get(kind, []))
    names = [] if names is None else names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) and name for name in names):
        raise InputError(f"{kind} must be a path, or a list of them")
    files: list[Path | str] = []
    for name in names:
        path = folder / name
        if os.path.isfile(path) or (kind == "video" and path.is_dir()):  # a long name is an error in Path.is_file
            files.append(path)
        elif kind == "image" and is_embedded(name):
            files.append(name)
        else:
            raise InputError(f"{path}: no such {kind} file")
    return tuple(files)


def _require_known(row: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in row.keys() - set(known):
        near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
        raise InputError(f"unknown key {key!r}: did you mean {near}? Notes go under extra")


def _turn(turn: Any, required: bool) -> Turn:
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
    if required and not answers:
        raise InputError("no answer: give answers, a list of all that are accepted")
    if not all(isinstance(answer, str) for answer in answers):
        raise InputError("answers must be text")
    return Turn(question, tuple(answers), _text(turn, "answer_prefix"))


def _text(row: dict[str, Any], key: str) -> str:
    text = "" if row.get(key) is None else row[key]
    if not isinstance(text, str):
        raise InputError(f"{key} must be text, not a JSON {type(text).__name__}")
    return text
