"""The README's numbers are those in benchmarks/results/."""

import json

import numpy as np
import pytest

import vlkv
from vlkv import policies

quality = pytest.importorskip("benchmarks.quality", reason="needs the extra bench")
tables = pytest.importorskip("benchmarks.quality_tables")


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_the_tables_are_made_of_the_results(root, name):
    rows = json.loads(tables.RESULTS.read_text())["rows"] if tables.RESULTS.exists() else []
    made = tables.documented(rows)
    marked = tables.MARKED.findall((root / name).read_text())
    assert marked and all(shown == made[mark] for _, mark, shown, _ in marked)


@pytest.mark.full
def test_rows_are_measured_once_and_beside_the_full_cache(miniature, tmp_path):
    """Two pages, on the first layers of the demo model; a second run finds all rows in the file."""
    sections = pytest.importorskip("benchmarks.quality_sections")
    params, processor = vlkv.load(miniature(layers=1, grid=24))
    random = [sections.Cell("ImgRandom", policies.ImgRandom(keep=b), b) for b in (0.5, 0.1)]
    plan = (sections.Cell("Full", policies.Full(), 1.0), sections.Cell("Oracle", "Oracle", 0.1), *random)
    section, path = sections.Section("baselines", "ledger", plan), tmp_path / "out.json"
    for _ in range(2):
        done = quality.Done(path, "a command")
        quality.measure(params, processor, section, 2, 0, done)
        rows = json.loads(path.read_text())["rows"]
        assert [row["name"] for row in rows] == [cell.name for cell in plan] and done.rows == rows
    full, oracle, half, tenth = rows
    assert full["held"] == full["same_as_full"] == 1 and full["loss"] == 0 and len(full["right"]) == 2
    assert oracle["held"] == pytest.approx(0.1, abs=0.01) and np.mean(oracle["recall"]) == 1
    assert half["held"] == pytest.approx(0.5, abs=0.01) and tenth["held"] == pytest.approx(0.1, abs=0.01)
    assert all(row["loss_low"] <= row["loss"] <= row["loss_high"] and row["perplexity"] > 1 for row in rows)
