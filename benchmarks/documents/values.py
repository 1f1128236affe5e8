"""Draws the values of a page: names, dates, codes, amounts and purchases."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

_WORDS: dict[str, list[str]] = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))
_DATES = ("%Y-%m-%d", "%d/%m/%Y", "%d %b %Y", "%b %d, %Y", "%d.%m.%Y")
_LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"


def is_held_out(text: str) -> bool:
    """Whether a drawn word, number or date (as in ISO 8601) belongs to the held-out pages."""
    return sum(map(ord, text)) % 5 == 0


class Bought(NamedTuple):
    """Items with their prices, and the sums, in cents."""

    items: list[tuple[str, int, int]]  # product, quantity, price
    rate: int  # of the tax, percent

    @property
    def subtotal(self) -> int:
        """Sum without tax."""
        return sum(quantity * price for _, quantity, price in self.items)

    @property
    def tax(self) -> int:
        """The tax, rounded half up."""
        return (self.subtotal * self.rate + 50) // 100


class Values:
    """Draws the values of one page from the training values or from the held-out ones."""

    def __init__(self, rng: np.random.Generator, held_out: bool) -> None:
        self.rng, self.held_out = rng, held_out
        self.currency, self.dates = self.any(("", "$")), self.any(_DATES)

    def title(self) -> str:
        """The title of a form."""
        return self.any(_WORDS["title"])

    def any(self, items: Sequence[str]) -> str:
        """An item that may occur in both sets."""
        return items[int(self.rng.integers(len(items)))]

    def own(self, make: Callable[[], str]) -> str:
        """The first result of `make` that belongs to this set."""
        while is_held_out(made := make()) != self.held_out:
            pass
        return made

    def word(self, kind: str) -> str:
        """A word of this set."""
        return self.own(lambda: self.any(_WORDS[kind]))

    def number(self, low: int, high: int) -> int:
        """A number of this set with low <= number < high."""
        return int(self.own(lambda: str(self.rng.integers(low, high))))

    def name(self) -> str:
        """A made-up family name or place, of which there are thousands, so that it must be read letter by letter."""
        return self.own(lambda: "".join(self.any(_WORDS[part]) for part in ("start", "middle", "end")))

    def person(self) -> str:
        """A first and a family name."""
        return f"{self.word('first')} {self.name()}"

    def firm(self) -> str:
        """A name and a trade."""
        return f"{self.name()} {self.any(_WORDS['trade'])}"

    def code(self) -> str:
        """Two letters and four digits."""
        return self.own(lambda: f"{self.any(_LETTERS)}{self.any(_LETTERS)}-{self.rng.integers(1000, 10000)}")

    def phone(self) -> str:
        """Seven digits."""
        return self.own(lambda: f"{self.rng.integers(200, 1000)}-{self.rng.integers(1000, 10000)}")

    def day(self, low: str = "2015-01-01", days: int = 4000) -> str:
        """A date less than so many days after `low`, in ISO 8601."""
        first = datetime.date.fromisoformat(low)
        return self.own(lambda: str(first + datetime.timedelta(days=int(self.rng.integers(days)))))

    def written(self, day: str) -> str:
        """A date in the page's format."""
        return datetime.date.fromisoformat(day).strftime(self.dates)

    def date(self) -> str:
        """A date of the last years in the page's format."""
        return self.written(self.day())

    def birth(self) -> str:
        """A date of birth in the page's format."""
        return self.written(self.day("1940-01-01", 24000))

    def money(self, cents: int) -> str:
        """An amount in the page's currency."""
        return f"{self.currency}{cents // 100:,}.{cents % 100:02}"

    def product(self) -> str:
        """A product."""
        return f"{self.any(_WORDS['adjective'])} {self.word('goods')}"

    def bought(self, count: int) -> Bought:
        """A purchase of `count` different products."""
        names: set[str] = set()
        while len(names) < count:
            names.add(self.product())
        items = [(name, int(self.rng.integers(1, 6)), self.number(20, 4000)) for name in sorted(names)]
        return Bought([items[i] for i in self.rng.permutation(count)], int(self.any(("5", "7", "10", "19", "20"))))
