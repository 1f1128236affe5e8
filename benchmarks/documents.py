"""Tables in documents, between marks such as `<!-- quality: NAME -->` and `<!-- /quality -->`."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path


def marked(kind: str) -> re.Pattern[str]:
    """Finds the parts between marks of a kind: the mark, its name, the content, the closing mark."""
    return re.compile(rf"(<!-- {kind}: (\w+) -->\n)(.*?)(\n<!-- /{kind} -->)", re.DOTALL)


def write(files: Iterable[Path], kind: str, content: Callable[[str], str]) -> None:
    """Replaces what is between the marks of a kind by the content of their names."""
    for file in files:
        file.write_text(marked(kind).sub(lambda mark: f"{mark[1]}{content(mark[2])}{mark[4]}", file.read_text()))


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    """The line below the header."""
    return "|---" * columns + "|"


def interval(mean: float, low: float, high: float, digits: int = 1) -> str:
    """A share in percent with its interval."""
    return f"{100 * mean:.{digits}f} [{100 * low:.{digits}f}, {100 * high:.{digits}f}]"
