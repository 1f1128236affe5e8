"""Makes batches of rows with the same number of turns and similar images and lengths, so that few shapes are compiled.

The same file and settings give the same batches, so a resumed run gives the same answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vlkv.tools.evaluation.records import Record


class Batch(NamedTuple):
    """Groups of rows. Rows of a group share the prompt up to their question. The last groups may be padding."""

    number: int
    groups: tuple[tuple[int, ...], ...]  # indices of records
    real: int  # number of groups that are not padding

    @property
    def rows(self) -> list[int]:
        """Indices of all records of the batch, without padding."""
        return [row for group in self.groups[: self.real] for row in group]


def batches(records: Sequence[Record], size: int, shared: Callable[[Record], str] | None) -> list[Batch]:
    """Divides all records into batches of `size` groups.

    Args:
        records: the rows of the file.
        size: B.
        shared: returns the prompt of a record up to its question. Records with the same images, videos and prompt up to
            the question form one group. None: every record is a group of its own.
    """
    groups: dict[object, list[int]] = {}
    for row, record in enumerate(records):
        prompt = (row,) if shared is None else (record.images, record.videos, shared(record))
        groups.setdefault((len(record.turns), prompt), []).append(row)

    def shape(group: list[int]) -> tuple[int, ...]:
        first = records[group[0]]
        length = len(first.context) + sum(len(turn.question) for turn in first.turns)
        return len(first.turns), len(first.images) + len(first.videos), len(group), length, group[0]

    result: list[Batch] = []
    for _, same_turns in itertools.groupby(sorted(groups.values(), key=shape), key=lambda group: shape(group)[0]):
        members = [tuple(group) for group in same_turns]
        for begin in range(0, len(members), size):
            part = members[begin : begin + size]
            result.append(Batch(len(result), tuple([*part, *part[-1:] * (size - len(part))]), len(part)))
    return result
