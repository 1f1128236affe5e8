"""The table of faults fits the project as it is; `python -m tests.plant_faults` plants them."""

import ast

from tests.plant_faults import FAULTS, planted


def test_every_fault_can_be_planted_and_has_its_test(root):
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 10
    for fault in FAULTS:
        text = (root / fault.file).read_text()
        faulty = planted(fault, text)
        assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(text)), fault.name
        file, _, test = fault.test.partition("::")
        assert f"def {test}" in (root / file).read_text(), fault.test
