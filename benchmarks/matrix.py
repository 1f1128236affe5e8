"""Runs every policy on a tiny model of every family; the prompts have two images, one image, and none.

    python -m benchmarks.matrix [--family NAME ...] [--out benchmarks/results/matrix.json]

A cell is one compiled `generate`. Its result is "ok" (`tests.families.tiny.check_output` passes), "refused: " and the
message if the policy cannot run on the family, or "failed: ". The file is written after every cell, and an interrupted
run is resumed. Needs a checkout of the repository, because it uses the models and batches of the tests.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "matrix.json"


def run_cell(params: Any, batch: Any, name: str) -> str:
    """Runs one policy on one family, and returns the text of the cell."""
    from tests.families import tiny
    from vlkv.errors import InputError

    try:
        policy = tiny.make_policy(name)
        tiny.check_output(batch, tiny.answer(params, batch, policy), policy)
    except InputError as error:
        return f"refused: {error}"
    except Exception as error:  # a failure is a result, and the other cells still run
        return f"failed: {type(error).__name__}: {error}".splitlines()[0]
    return "ok"


def main() -> None:
    """Runs all missing cells and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", help="families to run (default: all)")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Halves compile time, as in the tests. JAX reads it when it is imported.
    cheap = " --xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + cheap

    import jax

    from tests.families import tiny
    from vlkv import policies
    from vlkv.files import write_json
    from vlkv.tools.benching.machine import describe

    made: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    table: dict[str, dict[str, str]] = made.get("table", {})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for family in options.family or tiny.FAMILIES:
        row = table.setdefault(family, {})
        missing = [name for name in policies.registry if name not in row]
        if not missing:
            continue
        params, batch = tiny.make_model(family), tiny.make_batch(family)
        for name in missing:
            row[name] = run_cell(params, batch, name)
            write_json(options.out, {"machine": describe(), "new_tokens": tiny.NEW, "table": table})
            print(f"{family:18}{name:14}{row[name]}", flush=True)
        jax.clear_caches()
        gc.collect()
    show(table)


def show(table: dict[str, dict[str, str]]) -> None:
    """Prints a table with a row per policy and a column per family, then the reasons."""
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for row in table.values() for name in row))
    grid = Table("policy", *table)
    for name in names:
        grid.add_row(name, *(row.get(name, "").partition(":")[0] for row in table.values()))
    console = Console(width=220)
    console.print(grid)
    for family, row in table.items():
        for name, cell in row.items():
            if cell != "ok":
                console.print(f"{family}, {name}: {cell}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
