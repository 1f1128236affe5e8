"""The README's numbers are those in benchmarks/results/."""

import json

import pytest

quality = pytest.importorskip("benchmarks.quality", reason="needs the extra bench")
tables = pytest.importorskip("benchmarks.quality_tables")


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_the_tables_are_made_of_the_results(root, name):
    rows = json.loads(tables.RESULTS.read_text())["rows"] if tables.RESULTS.exists() else []
    made = tables.documented(rows)
    marked = tables.MARKED.findall((root / name).read_text())
    assert marked and all(shown == made[mark] for _, mark, shown, _ in marked)
