"""A judge: any command that reads a question, its references and an answer, and prints a score."""

from __future__ import annotations

import functools
import json
import math
import shlex
import subprocess
from collections.abc import Sequence

import numpy as np

from vlkv.errors import InputError
from vlkv.evaluation.records import Scored


def judge(command: str, scored: Sequence[Scored]) -> float:
    """Mean of the scores that a command gives.

    Args:
        command: run once for each answer, without a shell. Its standard input is one JSON object with `question`,
            `references` (a list) and `answer`; its standard output must be one number.
        scored: the answers.

    Raises:
        InputError: the command cannot be run, fails, or prints no number.
    """
    return float(np.mean([_ask(command, one.question, tuple(one.accepted), one.said) for one in scored]))


@functools.cache
def _ask(command: str, question: str, references: tuple[str, ...], answer: str) -> float:
    """One score. The cache avoids judging an answer twice if several policies gave it."""
    asked = json.dumps({"question": question, "references": list(references), "answer": answer})
    try:
        done = subprocess.run(shlex.split(command), input=asked, capture_output=True, text=True, check=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--judge {command}: cannot be run ({error})") from None
    if done.returncode:
        raise InputError(f"--judge {command}: failed with status {done.returncode}: {done.stderr.strip()[-200:]}")
    try:
        value = float(done.stdout)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"--judge {command}: printed {done.stdout.strip()[:80]!r}, expected one number")
    return value
