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


def test_the_tables_by_hand(tmp_path):
    """Two methods, one composition; sorted by what they are worth at 10 %."""

    def row(section, name, share, exact, bits=16):
        return {"section": section, "name": name, "bits": bits, "bytes": share, "exact": exact, "low": exact - 0.01,
                "high": exact + 0.01, "right": "1" * 500, "seed": tables.EVALUATED, "recall": [[0.5, 0.7], [1.0, 1.0]],
                "places": [0.9, 0.25]}  # fmt: skip

    every = ("baselines", "methods", "compositions", "compositions right")
    full = [row(section, "Full", 1.0, 0.9) for section in every]
    draw = row("baselines", "ImgRandom", 0.1, 0.1)
    bounds = [row("baselines", "Oracle", 0.02, 0.89), draw, row("baselines", "Downsample", 0.25, 0.5)]
    methods = [
        row("methods", "CSP", 0.1, 0.4),
        row("methods", "H2O", 0.1, 0.2),
        row("methods", "SnapKV", 0.1, 0.7),
        row("methods", "RoCo", 0.1, 0.3),
    ]
    best = tables.ON_ROWS
    smooth = [row("compositions", best, 0.02, 0.88, 4), row("compositions right", best, 0.01, 0.86, 4)]
    chosen_by = row("compositions", best, 0.02, 0.5, 4) | {"seed": tables.TUNED}
    file = tmp_path / "page.md"
    file.write_text(
        "a\n<!-- quality: summary -->\nold\n<!-- /quality -->\nb\n<!-- quality: compositions -->\n\n<!-- /quality -->\n"
    )
    tables.write_documents([*full, *bounds, *methods, *smooth, chosen_by], [file])
    summary, compositions = file.read_text().split("\nb\n")
    assert summary.startswith("a\n<!-- quality: summary -->\nThis table has 3 methods: 500 answers, full cache 90.0.")
    assert "For comparison: 500 answers, full cache 90.0 [89.0, 91.0]. Oracle" in summary
    assert "89.0 [88.0, 90.0] at 2 %" in summary and "old" not in summary and "RoCo" not in summary
    assert summary.index("| SnapKV |  | 70.0 |  |  |") < summary.index("| H2O |  | 20.0 |  |  |")
    made = tables.documented([*full, *bounds, *methods])
    assert made["papers"].splitlines()[2:] == ["| CSP | 40.0 | 60 100 | 90 25 |"]
    assert "Other methods" not in made["summary"]
    section = "damage ledger"
    measured = [row(section, "Full", 1.0, 0.9), row(section, "SnapKV", 0.1, 0.6), row(section, "RoCo", 0.1, 0.61)]
    measured += [row(section, "KVzip", 0.1, 0.7), row(section, "FlashCache", 0.1, 0.8)]
    better = tables.documented([*full, *bounds, *methods, *measured])["summary"]
    assert "at 10 %: FlashCache 80.0, KVzip 70.0 (SnapKV 60.0, full cache 90.0)." in better
    assert f"| {best}, 4 bits | 88.0 |  |  | 86.0 |" in compositions


def test_every_method_is_in_the_damage_suite():
    """At the bytes that it can reach; stores keep their own."""
    sections = pytest.importorskip("benchmarks.quality_sections")
    suites = [section for section in sections.sections(6, 32, 0) if section.name in tables.DAMAGE]
    assert len(suites) == len(tables.DAMAGE)
    for section in suites:
        cells = {cell.name: [c.bytes for c in section.plan if c.name == cell.name] for cell in section.plan}
        assert set(cells) == {cls.__name__ for cls in policies.registry.values()} | {"Downsample"}
        merging = {"LightKV", "ToMe", "PiToMe", "ToFu"}
        for name, shares in cells.items():
            if name not in ("Full", "KIVI", "TurboQuant", "Downsample"):
                assert shares == [b for b in tables.BYTES if b > 0.02 or name not in merging], name


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
