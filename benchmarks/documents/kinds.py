"""The kinds of documents: rows of text, and questions about the fields.

A kind is given the numbers of lines and of average characters that fit on the page, and fills it accordingly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.documents.drawing import Cell, Row
from benchmarks.documents.values import Bought, Values


class Sheet(NamedTuple):
    """A document and the questions about it."""

    rows: tuple[Row, ...]
    questions: tuple[tuple[str, str], ...]  # different questions, each with its answer
    width: float = 1.0  # of the paper, as a share of the page


def _sums(v: Values, bought: Bought, lines: int, left: float) -> Sheet:
    """The rows below the items: total, and above it subtotal and tax unless there is only one line."""
    sums = {"Subtotal": bought.subtotal, f"Tax {bought.rate} %": bought.tax, "Total": bought.subtotal + bought.tax}
    named = {"Total": bought.subtotal} if lines < 3 else sums
    rows, asked = [], []
    for i, (label, cents) in enumerate(named.items()):
        total, text = label == "Total", v.money(cents)
        rows.append(Row((Cell(label, left, "l", total), Cell(text, 0.98, "r", total)), above=i == 0))
        asked.append((f"What is the {label.split()[0].lower()}?", text))
    return Sheet(tuple(rows), tuple(asked))


def receipt(v: Values, lines: int, columns: int) -> Sheet:
    """A receipt of a shop: items with amounts, and the total."""
    shop = v.firm()
    rows, asked = [Row((Cell(shop, 0.5, "m", True, 1.2),), 1.3)], [("What is the name of the shop?", shop)]
    details = {"Date": v.date(), "Receipt": str(v.number(1000, 10**6)), "Phone": v.phone(), "Cashier": v.person(),
               "City": v.name()}  # fmt: skip
    centred = v.rng.random() < 0.4
    for i in v.rng.permutation(len(details))[: max(0, (lines - 4) // 3)]:
        label, value = list(details.items())[i]
        rows.append(
            Row((Cell(f"{label}: {value}", 0.5, "m"),) if centred else (Cell(label, 0.02), Cell(value, 0.98, "r")))
        )
        asked.append((f"What is the {label.lower()}{' number' * (label in ('Receipt', 'Phone'))}?", value))
    below = 3 if lines - len(rows) >= 7 else 1
    bought = v.bought(max(1, min(lines - len(rows) - below - 1, 14)))
    for i, (name, quantity, price) in enumerate(bought.items):
        amount, text = v.money(quantity * price), f"{quantity} x {name}" if quantity > 1 else name
        rows.append(Row((Cell(text, 0.02), Cell(amount, 0.98, "r")), above=i == 0))
        asked.append((f"What is the amount for {name}?", amount))
    sums = _sums(v, bought, below, 0.02)
    width = min(1.0, float(v.rng.uniform(32, 42)) / columns)
    return Sheet((*rows, *sums.rows), (*asked, *sums.questions), width)


def invoice(v: Values, lines: int, columns: int) -> Sheet:
    """An invoice of a firm: a head, and items with quantity, price and amount; a receipt if there is little space."""
    if lines < 13 or columns < 34:
        return receipt(v, lines, columns)
    firm = v.firm()
    day = v.day()
    details = {"Invoice number": v.code(), "Date": v.written(day), "Due date": v.written(v.day(day, 90)),
               "Customer": v.person()}  # fmt: skip
    head = (Cell(firm, 0, "l", True, 1.25), Cell("INVOICE", 1, "r", True, 1.25))
    rows, asked = [Row(head, 1.6, under=((0, 1),)), Row(height=0.4)], [("What is the name of the firm?", firm)]
    right = v.rng.random() < 0.5  # details on the right side
    for i in sorted(v.rng.permutation(4)[: int(v.rng.integers(2, 5))]):
        label, value = list(details.items())[i]
        rows.append(Row((Cell(label, 0.45), Cell(value, 1, "r")) if right else (Cell(label, 0), Cell(value, 0.35))))
        asked.append((f"What is the {label.lower()}?", value))
    columns_of = (("Item", 0.02, "l"), ("Quantity", 0.53, "r"), ("Price", 0.75, "r"), ("Amount", 0.98, "r"))
    shade = float(v.rng.choice([0.1, 0.25, 0.9]))
    rows += [Row(height=0.4), Row(tuple(Cell(*column, True) for column in columns_of), 1.1, shade=shade)]
    bought = v.bought(max(2, min(lines - len(rows) - 4, 12)))
    for name, quantity, price in bought.items:
        texts = (name, str(quantity), v.money(price), v.money(quantity * price))
        cells = [Cell(text, x, align) for text, (_, x, align) in zip(texts, columns_of, strict=True)]
        rows.append(Row(tuple(cells), under=((0, 1),)))
        asked += [(f"What is the {column.lower()} of {name}?", text)
                  for (column, _, _), text in zip(columns_of[1:], texts[1:], strict=True)]  # fmt: skip
    sums = _sums(v, bought, 3, 0.56)
    return Sheet((*rows, *sums.rows), (*asked, *sums.questions))


def form(v: Values, lines: int, columns: int) -> Sheet:
    """A form of labelled fields: values on rules, values in a column, or values in frames under their labels."""
    fields = {"Name": v.person(), "Birth date": v.birth(), "Street": f"{v.number(1, 200)} {v.name()} Street",
              "City": v.name(), "Postal code": str(v.number(10000, 100000)), "Phone": v.phone(), "Number": v.code(),
              "Occupation": v.word("job"), "Amount": v.money(v.number(500, 10**6)), "Date": v.date(),
              "Contact": v.person(), "Age": str(v.number(18, 90)), "Joining date": v.date(),
              "Room": str(v.number(100, 999)), "Reference": v.code(), "Country": v.name()}  # fmt: skip
    framed, ruled, centred = v.rng.random() < 0.4, v.rng.random() < 0.5, v.rng.random() < 0.5
    side = 2 if columns >= 44 and v.rng.random() < 0.6 else 1  # fields next to one another
    height = 1.9 if framed else 1.25
    space = columns / side * (0.8 if framed else 0.5)  # for a value
    fits = [label for label, value in fields.items() if len(value) <= space and len(label) < space]
    chosen = [str(name) for name in v.rng.permutation(fits)[: side * max(2, int((lines - 2) / height))]]
    chosen = chosen[: len(chosen) // side * side]
    title = Cell(v.title(), 0.5 if centred else 0, "m" if centred else "l", True, 1.25)
    rows = [Row((title,), 1.5, under=((0, 1),) * (not framed)), Row(height=0.3)]
    for i in range(0, len(chosen), side):
        cells: list[Cell] = []
        spans = [(j / side + 0.015 * j, (j + 1) / side - 0.015 * (side - 1 - j)) for j in range(side)]
        for label, (begin, end) in zip(chosen[i : i + side], spans, strict=True):
            if framed:
                cells += [Cell(label, begin + 0.015, size=0.75, y=0.15), Cell(fields[label], begin + 0.03, y=0.72)]
            else:
                cells += [Cell(label, begin), Cell(fields[label], begin + (end - begin) * 0.4)]
        under = [(begin + (end - begin) * 0.39, end) for begin, end in spans]
        rows.append(
            Row(tuple(cells), height, under=tuple(under) * (ruled and not framed), frames=tuple(spans) * framed)
        )
    return Sheet(tuple(rows), tuple((f"What is the {label.lower()}?", fields[label]) for label in chosen))


def table(v: Values, lines: int, columns: int) -> Sheet:
    """A table with two to four columns; a column of counts has its sum below."""
    kinds: dict[str, dict[str, Callable[[], str]]] = {
        "Stock": {"Product": v.product, "Count": lambda: str(v.number(1, 500)), "Code": v.code,
                  "Price": lambda: v.money(v.number(20, 10**5))},
        "Staff": {"Name": v.person, "Room": lambda: str(v.number(100, 999)), "Phone": v.phone, "Start date": v.date},
        "Departures": {"Town": v.name, "Time": lambda: f"{v.number(0, 24):02}:{v.number(0, 60):02}", "Train": v.code,
                       "Track": lambda: str(v.number(1, 30))},
        "Members": {"Name": v.person, "City": v.name, "Birth date": v.birth, "Number": v.code},
    }  # fmt: skip
    title = v.any(list(kinds))
    first, *others = list(kinds[title])[: 2 if columns < 26 else 3 if columns < 44 else 4]
    others = [others[i] for i in v.rng.permutation(len(others))]
    places = {2: (0.98,), 3: (0.72, 0.98), 4: (0.56, 0.77, 0.98)}[1 + len(others)]
    ends = (0.0, 2 * places[0] - places[1] + 0.02 if len(places) > 1 else 0.68, *(x + 0.02 for x in places))
    frames = tuple(itertools.pairwise(ends)) * (v.rng.random() < 0.4)
    zebra, shade = v.rng.random() < 0.5, float(v.rng.choice([0.1, 0.25, 0.9]))

    def row(texts: Sequence[str], bold: bool = False, **options: Any) -> Row:
        cells = (
            Cell(texts[0], 0.02, "l", bold),
            *(Cell(t, x, "r", bold) for t, x in zip(texts[1:], places, strict=True)),
        )
        return Row(cells, frames=frames, **options)

    rows = [
        Row((Cell(title + f", {v.date()}" * (columns >= 32), 0, "l", True, 1.2),), 1.5),
        row([first, *others], True, shade=shade),
    ]
    asked, count = [], 0
    names = dict.fromkeys(kinds[title][first]() for _ in range(max(2, min(lines - 4, 18))))
    for i, name in enumerate(names):
        values = {column: kinds[title][column]() for column in others}
        count += int(values.get("Count", 0))
        under = ((0.0, 1.0),) * (not frames and not zebra)
        rows.append(row([name, *values.values()], shade=0.06 * (zebra and i % 2), under=under))
        asked += [(f"What is the {column.lower()} of {name}?", value) for column, value in values.items()]
    if count:
        rows.append(row(["Total", *(str(count) * (column == "Count") for column in others)], True, above=True))
        asked.append(("What is the total count?", str(count)))
    return Sheet(tuple(rows), tuple(asked))


KINDS: dict[str, Callable[[Values, int, int], Sheet]] = {
    "receipt": receipt, "invoice": invoice, "form": form, "table": table,
}  # fmt: skip
