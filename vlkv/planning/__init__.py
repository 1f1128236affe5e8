"""Plans for hardware that is not there: `vlkv.planning.plan("qwen2-vl-7b", topology="v5e:4x4", prompt=8192, ...)`.

chips       what a chip has, and what a topology's name means
questions   prompts of a given length, as shapes
sizes       bytes of arrays in a chip's memory
programs    compiling for absent chips, and reading the result
arithmetic  the mesh to begin with, and what would fit
estimate    how long a program would take
running     one policy's programs, one after another
planning    `plan`, all of it together
report      the same as a table and as JSON
"""

from __future__ import annotations

from vlkv.planning.chips import CHIPS
from vlkv.planning.jobs import Run, Step
from vlkv.planning.planning import Plan, plan
from vlkv.planning.report import as_json, as_table

__all__ = ["CHIPS", "Plan", "Run", "Step", "as_json", "as_table", "plan"]
