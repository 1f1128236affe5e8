"""The error for bad input. Its message names what is wrong and how to correct it."""

import difflib
import re
from collections.abc import Iterable

LONGEST = 200  # characters of a message


class InputError(ValueError):
    """An input of the caller cannot be used. The message is one line of at most `LONGEST` characters."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def suggestion(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """ "did you mean ...?" with the known name that is most similar to a wrong one, or else another hint."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def shortened(message: str) -> str:
    """The message in one line. If it is too long, because it quotes a long value, the middle of every long word is
    removed, and then, if necessary, whole words of the message before its last third, which holds the remedy.
    """
    line = " ".join(message.splitlines())
    if len(line) > LONGEST:
        line = re.sub(r"\S{80,}", lambda word: f"{word[0][:30]}...{word[0][-40:]}", line)
    if len(line) > LONGEST:
        gap, end = " ... ", LONGEST * 2 // 3
        head, tail = line[: end + 1], line[end + len(gap) - LONGEST - 1 :]
        line = (head.rpartition(" ")[0] or head[:-1]) + gap + (tail.partition(" ")[2] or tail[1:])
    return line
