"""A plan for GPUs, for which there is no compiler: it claims nothing that only a compiler knows."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

import vlkv
from tests.models import CONFIG
from vlkv.policies import SnapKV
from vlkv.tools import planning
from vlkv.tools.planning.arithmetic import gib

pytestmark = pytest.mark.usefixtures("shapes_for_arrays")
JOB = dict(batch=2, prompt=100, new_tokens=4)


def printed(plan):
    console = Console(file=io.StringIO(), record=True, width=160)
    console.print(planning.as_table(plan))
    return console.export_text()


def test_a_gpu_plan_does_not_contradict_itself():
    said = []
    plan = planning.plan(CONFIG, topology="h100:1", policy=SnapKV(keep=0.2), report=said.append, **JOB)
    assert len(said) == 4 and all(line.startswith("computing the shapes of ") for line in said)
    text = printed(plan)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert rows and all(all(cells) for cells in rows), "no empty cell"
    named = {cells[0]: cells[1:] for cells in rows}
    usable = plan.topology.chip.usable
    assert named["fits"] == [f"with up to {gib(usable - run.used)} more" for run in plan.runs]
    assert named[f"needed of {gib(usable)}"] == [f"{gib(run.used)} + temporaries" for run in plan.runs]
    assert text.count("compile") == 1 and "without a compiler" in text and "by the compiler" not in text
    content = json.loads(json.dumps(planning.as_json(plan)))
    assert content["fits"] is None and {run["fits"] for run in content["runs"]} == {None}


def test_what_alone_is_too_large_does_not_fit():
    large = dataclasses.replace(CONFIG.decoder, vocab_size=2**30)
    plan = planning.plan(dataclasses.replace(CONFIG, decoder=large), topology="h100:1", **JOB)
    assert plan.fits is False and plan.runs[0].used > plan.topology.chip.usable
    assert "does not fit. Changes that would fit" in printed(plan)


@pytest.mark.parametrize("options", [{"whole": True}, {"quick": False}])
def test_options_of_the_compiler_are_refused(options):
    with pytest.raises(vlkv.InputError, match="nothing is compiled for GPUs, so leave out --generate and --thorough"):
        planning.plan(CONFIG, topology="h100:1", **options, **JOB)
