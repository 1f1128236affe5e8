"""The table "verified checkpoints" of docs/models.md, to which `vlkv verify NAME --record` adds lines."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import vlkv
from vlkv.errors import InputError
from vlkv.files import read_json, read_text, replacing
from vlkv.tools.benching import machine
from vlkv.tools.evaluation import fingerprint

DOCUMENT = Path(vlkv.__file__).parents[1] / "docs" / "models.md"
_TABLE = re.compile(r"(<!-- verified checkpoints -->\n(?:.*\n){2})((?:\|.*\n)*)(<!-- /verified checkpoints -->)")


class Source(NamedTuple):
    """Where weights come from."""

    name: str
    revision: str
    source: str


def source_of(model: str, folder: Path) -> Source:
    """Where the weights of a folder come from, which the user called `model`.

    `source.json` in the folder says it, if there is one. A snapshot of the hub has its commit. Any other folder is
    described by a hash of its files.
    """
    stated = read_json(folder / "source.json")
    if stated is not None:
        if not all(isinstance(stated.get(field), str) for field in Source._fields):
            raise InputError(f"{folder / 'source.json'}: expected the texts {', '.join(Source._fields)}")
        return Source(*(stated[field] for field in Source._fields))
    if folder.parent.name == "snapshots":
        return Source(model, folder.name[:12], "Hugging Face hub")
    return Source(Path(model).name, f"sha256 {fingerprint.of_model(folder)['files'][:12]}", "a local folder")


def find_table(document: Path = DOCUMENT) -> re.Match[str]:
    """The document's table: the text up to its lines, the lines, and the mark after them."""
    table = _TABLE.search(read_text(document) or "")
    if table is None:
        raise InputError(f"{document}: has no table of verified checkpoints; --record needs a clone of the repository")
    return table


def record(report: Mapping[str, Any], folder: Path, document: Path = DOCUMENT) -> None:
    """Adds one line per precision, or replaces the lines of the same checkpoint, revision and processor."""
    table = find_table(document)
    text = table.string
    lines = {_identity(line): line for line in table[2].splitlines()}
    lines |= {_identity(line): line for line in _lines(report, source_of(report["model"], folder))}
    with replacing(document) as partial:
        changed = "".join(f"{line}\n" for line in lines.values())
        partial.write_text(text[: table.start(2)] + changed + text[table.end(2) :], encoding="utf-8")


def _lines(report: Mapping[str, Any], source: Source) -> list[str]:
    about = machine.describe()
    processor = about["processor"] if about["device"] == "cpu" else about["device"]
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["dtype"] == dtype]
        worst = max(rows, key=lambda row: row["logit_error"] / row["allowed"])
        cells = [
            *source, dtype, f"{worst['logit_error']:.2g} of {worst['allowed']:.2g}", f"{worst['logit_std']:.3g}",
            "; ".join(map(_tokens, rows)), processor,
            ", ".join(f"{name} {report['versions'][name]}" for name in ("vlkv", "jax", "transformers")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def _tokens(row: Mapping[str, Any]) -> str:
    """The tokens before the first difference, and by how many logits transformers prefers its own token there."""
    same = f"{row['tokens']}/{row['of']}"
    return same if row["tokens"] == row["of"] else f"{same}, then a margin of {row['margin']:.2g}"


def _identity(line: str) -> tuple[str, ...]:
    """Name, revision, precision and processor of a line."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return tuple(cells[i] for i in (0, 1, 3, 7))
