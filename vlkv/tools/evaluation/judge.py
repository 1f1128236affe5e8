"""Scores answers with an external command, which reads a question, its references and an answer."""

import functools
import json
import math
import shlex
import subprocess

from vlkv.errors import InputError
from vlkv.tools.evaluation.records import Scored


def judge(command: str, item: Scored) -> float:
    """The score that a command, which is run without a shell, prints for an answer.

    Its standard input is one JSON object with `question`, `references` (a list) and `answer`; its standard output must
    be one number, or InputError is raised.
    """
    return _score(command, item.question, tuple(item.accepted), item.answer)


@functools.cache  # several policies often give the same answer
def _score(command: str, question: str, references: tuple[str, ...], answer: str) -> float:
    task = json.dumps({"question": question, "references": list(references), "answer": answer})
    try:
        process = subprocess.run(shlex.split(command), input=task, capture_output=True, text=True, check=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--judge {command}: cannot be run ({error})") from None
    if process.returncode:
        raise InputError(f"--judge {command}: failed with status {process.returncode}: {process.stderr.strip()[-200:]}")
    try:
        value = float(process.stdout)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"--judge {command}: printed {process.stdout.strip()[:80]!r}, expected one number")
    return value
