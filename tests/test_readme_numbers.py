"""The README's numbers are those in benchmarks/results/."""

from __future__ import annotations

import json
import re

import pytest

quality = pytest.importorskip("benchmarks.quality", reason="needs the extra bench")


def test_the_tables_are_made_of_the_results(root):
    rows = json.loads(quality.RESULTS.read_text())["rows"] if quality.RESULTS.exists() else []
    shown = re.search(r"<!-- quality -->\n(.*?)\n<!-- /quality -->", (root / "README.md").read_text(), re.DOTALL)
    assert shown is not None and shown[1].strip() == quality.readme(rows)


def test_the_tables_by_hand():
    """Two methods, one composition; sorted by what they are worth at 10 %."""

    def row(section, name, share, exact, bits=16):
        return {"section": section, "name": name, "bits": bits, "bytes": share, "exact": exact, "low": exact - 0.01,
                "high": exact + 0.01, "questions": 500, "seed": quality.EVALUATED}  # fmt: skip

    full, draw = row("methods", "Full", 1.0, 0.9), row("baselines", "ImgRandom", 0.1, 0.1)
    bounds = [row("baselines", "Oracle", 0.02, 0.89), draw, row("baselines", "Downsample", 0.25, 0.5)]
    methods = [row("methods", "H2O", 0.1, 0.2), row("methods", "SnapKV", 0.1, 0.7)]
    smooth = [row("compositions", "smooth", 0.02, 0.88, 4), row("compositions right", "smooth", 0.01, 0.86, 4)]
    chosen_by = row("compositions", "smooth", 0.02, 0.5, 4) | {"seed": quality.TUNED}
    rows = [full, *bounds, *methods, *smooth, chosen_by]
    text = quality.readme(rows)
    assert "The full cache has 90.0 [89.0, 91.0]; Oracle" in text and "89.0 [88.0, 90.0] at 2 %" in text
    assert text.index("| SnapKV |  | 70.0 |  |  |") < text.index("| H2O |  | 20.0 |  |  |")
    assert "| smooth |  | 88.0 |  | , 86.0 |" in text


def test_places_and_pairs_by_hand():
    assert quality.by_place(["1 2 3", "1 9", "7"], ["1 2 4", "1 2", "7 7"]) == [1.0, 0.3333, 0.0]
    mean, low, high = quality.paired("1110", "1001")
    assert mean == 0.25 and low == pytest.approx(0.25 - 1.96 * 0.9574271 / 2) and high > 1
