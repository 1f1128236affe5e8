"""The table of faults fits the project as it is; `python -m tests.plant_faults` plants them."""

import ast
import tomllib
from typing import Any

from tests.plant_faults import table


def test_every_fault_can_be_planted(root):
    faults = table()
    assert len({fault.name for fault in faults}) == len(faults) >= 100
    for fault in faults:
        text = (root / fault.file).read_text()
        assert meaning(fault.file, fault.planted(text)) != meaning(fault.file, text), fault.name


def meaning(file: str, text: str) -> Any:
    return tomllib.loads(text) if file.endswith(".toml") else ast.dump(ast.parse(text))
